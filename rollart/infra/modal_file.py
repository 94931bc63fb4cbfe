"""Modal apps of the reward functions, as files for Modal's own client (`modal deploy`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.errors import SpecError
from rollart.infra.files import RenderedFiles, json_text, refuse_image
from serverless.deploy.images import python_version
from serverless.deploy.modal_app import container_files, container_options, install_options
from serverless.deploy.package import Package
from serverless.providers.modal_client import ModalSettings
from serverless.secrets import Secrets

APP = "modal_app.py"
SETTINGS = "modal_app.json"
SOURCE = Path(__file__).with_name("modal_source.py")
"""Rendered as the app file: fixed code, beside its settings."""


def modal(name: str, packages: Sequence[Package], settings: ModalSettings, secrets: Secrets) -> RenderedFiles:
    """`modal_app.py`, its settings, and each function's files. PackageError for requirements without a version;
    SpecError for names that are equal as Python variables."""
    files: dict[str, bytes] = {APP: SOURCE.read_bytes()}
    apps: list[dict[str, Any]] = []
    for package in packages:
        package.check_pinned()
        spec = package.spec
        refuse_image(spec)
        variable = re.sub(r"\W", "_", spec.name)
        if other := next((a["files"] for a in apps if a["variable"] == variable), None):
            raise SpecError(
                f"function '{spec.name}' would be the variable {variable}, as '{other.rpartition('/')[2]}' is",
                remedy="rename the function",
            )
        directory = f"functions/{spec.name}"
        apps.append(
            {
                "variable": variable,
                "app": settings.prefix + spec.name,
                "version": package.version,
                "files": directory,
                "requirements": list(spec.requirements),
                "python": settings.python or python_version(),
                "options": container_options(spec) | {"min_containers": spec.warm},
                **({"env": dict(spec.env)} if spec.env else {}),
                **({"secrets": secrets.in_modal(spec)} if spec.secrets else {}),
                **({"install_options": options} if (options := install_options(spec)) else {}),
            }
        )
        files |= {f"{directory}/{path}": data for path, data in container_files(package).items()}
    files[SETTINGS] = json_text({"cluster": name, "functions": apps})
    where = f" --env {settings.environment}" if settings.environment else ""
    return RenderedFiles(files, tuple(f"modal deploy{where} {APP}::{app['variable']}" for app in apps))
