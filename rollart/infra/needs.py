"""Requirements of a run's pods other than devices: files that its specs name, an identity, secrets by name, and
disks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rollart.errors import SpecError
from rollart.settings.base import host_and_port, is_loopback
from rollart.settings.cluster import ClusterSpec
from rollart.settings.planning import hub_model
from rollart.settings.run import RunSpec

LARGEST = 900_000
"""Maximum bytes of a run's files in its ConfigMap, which Kubernetes limits to a megabyte."""

MODAL = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")


@dataclass(frozen=True, slots=True)
class ClusterNeeds:
    """`cloud`: the controller calls functions or a bucket of its provider, with an identity of its own; `pulls`:
    engines' hosts do too. `secrets` of the controller and `played` of environments are names of variables. `local` is a
    directory on each engine host's own disk, `shared` one directory for the controller and all of them; '' for none."""

    cloud: bool = False
    pulls: bool = False
    secrets: tuple[str, ...] = ()
    played: tuple[str, ...] = ()
    local: str = ""
    shared: str = ""
    service: int = 0
    """Port at which an external trainer reads batches from the controller; 0 for none."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Settings of pods and nodes. `images` by pool and `head`, `image` for the others; `specs`: the run's files by
    relative path, which every pod mounts; `env` of the head."""

    image: str
    images: Mapping[str, str] = field(default_factory=dict)
    needs: ClusterNeeds = field(default_factory=ClusterNeeds)
    specs: Mapping[str, str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        return self.images.get(name, self.image)


def cluster_needs(run: RunSpec | None, cluster: ClusterSpec, variables: Sequence[str] = ()) -> ClusterNeeds:
    """Requirements of a cluster and of the run on it. `variables`: those of the controller that functions have as
    secrets. SpecError for a store that pods cannot share."""
    functions = cluster.functions
    secrets = list(variables)
    if "http" in functions.chain:
        secrets += [name for one in functions.http.values() for name in (one.token_env, one.secret_env) if name]
    if "modal" in functions.chain:
        secrets += MODAL
    host, port = host_and_port(cluster.trainer.external or "127.0.0.1:0")
    variable = (cluster.trainer.external_token or "").partition("env:")[2]
    secrets += [variable] if variable else []
    store = None if run is None else run.weights.store
    domains = run.domains if run is not None else ()
    played = [str(d.environment_args["token_env"]) for d in domains if d.environment_args.get("token_env")]
    shared = ""
    if store is not None and store.kind == "files":
        if not os.path.isabs(store.url):
            raise SpecError(
                f"weights.store.url is '{store.url}' (rule: an absolute directory, which is a volume of all nodes)",
                remedy="give an absolute one, or s3://BUCKET/PREFIX",
            )
        shared = store.url
    return ClusterNeeds(
        cloud="aws_lambda" in functions.chain or (store is not None and store.kind == "s3"),
        pulls=store is not None and store.kind == "s3",
        secrets=tuple(dict.fromkeys(secrets)),
        played=tuple(dict.fromkeys(played)),
        local="" if store is None or store.local is None else store.local,
        shared=shared,
        service=0 if is_loopback(host) else port,
    )


def spec_files(run: RunSpec, cluster: ClusterSpec, base: Path, cluster_base: Path) -> dict[str, str]:
    """The files that the specs name, as text by relative path; they lie beside the specs on every node. These are
    sources and requirements of reward functions, modules of environments, tools and producers, a model's configuration,
    data to train on, prices and calibrations. SpecError for files that cannot be copied."""
    found: dict[str, str] = {}
    for path in dict.fromkeys([*_files(run, base), *_modules(run, base)]):
        found[path] = _text(base, path)
    for path in [*([cluster.prices] if cluster.prices else []), *cluster.calibration]:
        found[path] = _text(cluster_base, path)
    weight = sum(len(text.encode()) for text in found.values())
    if weight > LARGEST:
        raise SpecError(
            f"what the run's specs name beside them is {weight} bytes (rule: at most {LARGEST} go along)",
            remedy="put it into the image, and name functions and environments by module",
        )
    return found


def _files(run: RunSpec, base: Path) -> Iterator[str]:
    named = None if hub_model(run.model, str(base)) is not None else run.model.path
    for key, path in (("path", named), ("tokenizer", run.model.tokenizer)):
        if path is not None and ":" not in path and not os.path.isabs(path):
            raise SpecError(
                f"model.{key} is '{path}', beside the run file (rule: a directory of every node)",
                remedy="give an absolute path, in the image or on a volume",
            )
    if isinstance(run.model.config, str) and not os.path.isabs(run.model.config):
        yield run.model.config
    if run.training.data is not None and not os.path.isabs(run.training.data):
        yield run.training.data
    for function in run.functions:
        if function.source.endswith(".py") and not os.path.isabs(function.source):
            yield function.source
        for line in function.requirements or ():
            if line.endswith(".txt") and not os.path.isabs(line):
                yield line


def _modules(run: RunSpec, base: Path) -> Iterator[str]:
    """Imported modules that lie beside the run file."""
    named: list[Any] = [run.model.init, run.model.tokenizer]
    for domain in run.domains:
        played = domain.environment
        named += [played if isinstance(played, str) else played.harness, *domain.environment_args.values()]
        named += [domain.chat and domain.chat.tools]
    named += [f"{f.source}:{f.handler}" for f in run.functions if not f.source.endswith(".py")]
    for name in named:
        top = name.partition(":")[0].partition(".")[0] if isinstance(name, str) and ":" in name else ""
        if not top.isidentifier():
            continue
        if (base / f"{top}.py").is_file():
            yield f"{top}.py"
        elif (base / top).is_dir():
            yield from (str(PurePosixPath(path.relative_to(base))) for path in sorted((base / top).rglob("*.py")))


def _text(base: Path, path: str) -> str:
    if ".." in PurePosixPath(path).parts or os.path.isabs(path):
        raise SpecError(
            f"'{path}' is not below the spec that names it (rule: what goes along lies beside it)",
            remedy="move it there, or put it into the image",
        )
    try:
        return (base / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise SpecError(f"{base / path}: cannot go along: {why}", remedy="put it into the image") from None
