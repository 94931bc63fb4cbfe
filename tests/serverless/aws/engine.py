"""A container engine for tests, with docker's commands: it executes the Python parts of a Dockerfile and nothing else.

`build` lays out a directory in place of an image: COPY from the context, `python -m pip install` into the directory.
Base images, `apt-get` and platforms are not executed, and neither is the user's part of a Dockerfile but its COPYs.
`push` keeps the directory under the digest of its manifest, which it puts into the registry (moto's ECR) through boto3.
`ENGINE_ROOT` is the directory of images; every command is appended to `ENGINE_ROOT/commands.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(os.environ.get("ENGINE_ROOT", "."))


def build(options: list[str]) -> None:
    context, uri = pathlib.Path(options[-1]), options[options.index("--tag") + 1]
    image = ROOT / "built" / hashlib.sha256(uri.encode()).hexdigest()
    shutil.rmtree(image, ignore_errors=True)
    directory = image
    for line in (context / "Dockerfile").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            directory = image / rest.strip("/")
            directory.mkdir(parents=True, exist_ok=True)
        elif word == "COPY" and not rest.startswith("--"):
            source, target = rest.split()
            place = image / target.strip("/") if target.startswith("/") else directory / target
            copy(context / source, place, into=target.endswith("/"))
        elif word == "RUN" and rest.startswith("python -m pip install"):
            install(shlex.split(rest), directory)
        elif word == "CMD":
            (image / "command.json").write_text(rest)
    (image / "platform").write_text(options[options.index("--platform") + 1])


def copy(source: pathlib.Path, target: pathlib.Path, *, into: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    target = target / source.name if into else target
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def install(command: list[str], directory: pathlib.Path) -> None:
    """AWS's runtime client is that of the test plane."""
    lock = directory / "requirements.txt"
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("awslambdaric==")]
    wanted = directory / "wanted.txt"
    wanted.write_text("\n".join(lines))
    arguments = [sys.executable, *command[1:-1], str(wanted), "--target", str(directory), "--quiet"]
    subprocess.run(arguments, check=True)


def push(uri: str) -> None:
    import boto3

    image = ROOT / "built" / hashlib.sha256(uri.encode()).hexdigest()
    content = sorted((p.relative_to(image).as_posix(), p.read_bytes()) for p in image.rglob("*") if p.is_file())
    layer = {"digest": f"sha256:{hashlib.sha256(repr(content).encode()).hexdigest()}", "size": len(content)}
    media = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = json.dumps({"schemaVersion": 2, "mediaType": media, "config": layer, "layers": [layer]})
    repository, _, tag = uri.partition("/")[2].partition(":")
    ecr = boto3.client("ecr", endpoint_url=os.environ["ENGINE_REGISTRY"], region_name=uri.split(".")[3])
    put = ecr.put_image(repositoryName=repository, imageManifest=manifest, imageTag=tag)
    digest = put["image"]["imageId"]["imageDigest"].removeprefix("sha256:")
    shutil.copytree(image, ROOT / digest, dirs_exist_ok=True)


def main(arguments: list[str]) -> None:
    given = sys.stdin.read() if "--password-stdin" in arguments else ""
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / "commands.jsonl").open("a") as file:
        file.write(json.dumps({"arguments": arguments, "given": given}) + "\n")
    command, *options = arguments
    if command == "build":
        build(options)
    elif command == "push":
        push(options[-1])


if __name__ == "__main__":
    main(sys.argv[1:])
