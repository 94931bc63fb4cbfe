"""Reward functions as Modal apps, one per function: `modal deploy modal_app.py::NAME`.

Rendered by `rollart infra render --target modal`: change the spec, not this. It reads `modal_app.json`, the settings of
each function, and the functions' files, both beside it. Deploying it needs rollart, since the container's entry is
`serverless.deploy.modal_entry`.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import modal

from serverless.deploy.modal_entry import call

HERE = pathlib.Path(__file__).resolve().parent


def app_of(function: dict[str, Any]) -> modal.App:
    """The app of one function: its files and no others of this machine."""
    app = modal.App(function["app"], include_source=False)
    image = modal.Image.debian_slim(python_version=function["python"])
    if function["requirements"]:
        image = image.uv_pip_install(*function["requirements"], **function.get("install_options", {}))
    options = function["options"] | {"memory": tuple(function["options"]["memory"])}
    if "env" in function:
        options["env"] = function["env"]
    if "secrets" in function:
        named = function["secrets"].items()
        options["secrets"] = [modal.Secret.from_name(name, required_keys=keys) for name, keys in named]
    app.function(image=image.add_local_dir(HERE / function["files"], "/root"), **options)(call)
    return app


if (HERE / "modal_app.json").exists():
    SETTINGS = json.loads((HERE / "modal_app.json").read_text())
    globals().update({function["variable"]: app_of(function) for function in SETTINGS["functions"]})
