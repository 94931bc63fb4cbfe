"""The rendered files of built-in specs. `python tests/infra/goldens.py` writes them again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rollart.settings.load import builtin
from rollart.tools.infra import render

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
RUN = HERE / "run.yaml"
FLEET = HERE / "fleet/run.yaml", HERE / "fleet/cluster.yaml"
"""A run of everything that a cluster may have to carry, and its cluster."""

CLUSTERS = ("local", "aws-mix", "rollart-96h800-32h20", "3000-gpus")

SECRETS = (
    "cluster.functions.secrets={JUDGE_API_KEY: {aws_secret: 'prod/judge:key', modal: judge}, LOG_KEY: {ssm: /log}}"
)
KEY = "arn:aws:kms:us-east-1:123456789012:key/k"
AWS = (
    "cluster.functions.backend=aws_lambda",
    f"cluster.functions.aws_lambda={{region: us-east-1, kms_key_arn: '{KEY}'}}",
    SECRETS,
)
MODAL = ("cluster.functions.backend=modal", "cluster.functions.modal={python: '3.12'}", SECRETS)


def cluster(name: str) -> Path:
    return builtin(f"clusters/{name}.yaml")


def rendered() -> dict[str, str]:
    """Text by path: the files of every built-in cluster, and of the functions of a small run; packages by name
    alone, since any edit of a handler changes their digests."""
    files: dict[str, str] = {}
    for name in CLUSTERS:
        for target in ("kuberay", "ray"):
            files |= _texts(f"{name}/{target}", render(target, None, cluster(name), images=["rollart:test"]).files)
    job = render("kuberay", RUN, cluster("local"), images=["rollart:test"], namespace="rl")
    files |= _texts("run/kuberay", job.files)
    for target in ("cfn", "sam", "terraform"):
        files |= _texts(f"run/{target}", render(target, RUN, cluster("local"), AWS).files)
    for target in ("kuberay", "ray"):
        files |= _texts(f"fleet/{target}", render(target, *FLEET).files)
    for target in ("cfn", "sam", "terraform"):
        files |= _texts(f"fleet/{target}", render(target, *FLEET).files)
    files |= _texts("run/knative", render("knative", RUN, cluster("local"), namespace="rl").files)
    files |= _texts("run/modal", render("modal", RUN, cluster("local"), MODAL).files)
    return files


def _texts(prefix: str, files: Mapping[str, bytes]) -> dict[str, str]:
    return {
        f"{prefix}/{path}": stable(data.decode())
        for path, data in files.items()
        if not path.startswith("functions/") and path != "modal_app.py"
    }


def stable(text: str) -> str:
    text = re.sub(r"[0-9a-f]{64}", "DIGEST", text)
    text = re.sub(r"(DIGEST.zip: )\S+", r"\1ARCHIVE", text)
    text = text.replace(f":{metadata.version('rollart')}\n", ":VERSION\n")
    text = re.sub(r"[0-9a-f]{32}\.zip", "ARCHIVE.zip", text)
    return re.sub(r"V[0-9a-f]{12}\b", "VERSION", text)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, text in rendered().items():
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(text)
