"""What is wrong with a run, found from its specs before anything is started, by the code that a launch runs.

The model's configuration is read as the embedded engine reads it, the reward functions are packed as for their workers,
and environments are looked at where they will live. Those of the controller are made in this process, as they will be.
Those of hosts are made in one process of the hosts' interpreter, once, in a bounded time. What lives on other machines
is theirs to have: only those can look.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rollart.adapters.envs.look import MODULE, WARM, Trouble, look
from rollart.architecture import read_architecture, refuse_unsupported, weight_files
from rollart.compose.environments import hook, import_paths, made_by_hosts
from rollart.compose.prepare import harness_of, import_attribute, refuse_incomplete
from rollart.compose.rewards import check
from rollart.errors import RollartError, SpecError, UsageError
from rollart.spec.environments import UNLESS_QUICK
from rollart.spec.resolve import Resolved, Specs
from rollart.spec.where import Found, Where, refuse
from rollart.spec.work import initial_config

__all__ = ["decided", "environment_problems", "function_problems", "model_problems", "refuse_unlaunchable"]

_WELL: dict[str, bool] = {}
"""What was looked at in this process and found well, and whether each environment of it declares itself quick: the
command line looks before it makes a run's directory, and the run looks for those who start it by themselves."""

SHIPPED = "rollart."
"""Environments of ours are imported in any process."""

WATCHED = "rollart.adapters.clusters.pdeathsig"
"""Runs a module that ends with this process."""

INSTALL = "install what it needs where environments live: see docs/environments.md"


def refuse_unlaunchable(specs: Resolved | Specs, where: Where | None = None, *, plan: bool = False) -> None:
    """SpecError with a line for each thing that a launch would refuse later: the model, reward functions, environments,
    an image hook or interpreter. `where`: the specs' documents, whose lines are named. `plan`: the model may be one
    for plans alone, with a `config` and no weights."""
    with _path(specs.base):
        found = [*model_problems(specs, plan=plan), *function_problems(specs)]
    refuse([*found, *environment_problems(specs)], where)


def model_problems(specs: Resolved | Specs, *, plan: bool = False) -> Iterator[Found]:
    """What is wrong with the policy's directory, configuration and tokenizer."""
    model, base = specs.run.model, Path(specs.base)
    try:
        if not plan or model.init is not None:
            refuse_incomplete(model)
    except SpecError as error:
        yield Found(("run", "model"), error.message, error.remedy)
    if model.path is not None and not (_elsewhere(specs) and model.tokenizer is not None):
        found = list(_directory_problems(specs, base / model.path))
        yield from found
        if found:
            return
    if model.init is not None:
        try:
            init = initial_config(model.init, specs.base)
            if specs.cluster.engines.kind != "vllm":
                refuse_unsupported(init, "model.init")
        except (SpecError, UsageError) as error:
            yield Found(("run", "model", "init"), error.message, _or_vllm(error))
    if model.tokenizer is not None and ":" in model.tokenizer:
        try:
            import_attribute(model.tokenizer, "model.tokenizer")
        except SpecError as error:
            yield Found(("run", "model", "tokenizer"), error.message, error.remedy)
    elif (named := model.tokenizer or model.path) is not None:
        key = "path" if model.tokenizer is None else "tokenizer"
        if not (base / named / "tokenizer.json").is_file():
            why = f"model.{key} is '{named}', where there is no tokenizer.json (rule: a directory with one)"
            yield Found(
                ("run", "model", key), why, "save the tokenizer beside the model, or name it in model.tokenizer"
            )


def _directory_problems(specs: Resolved | Specs, path: Path) -> Iterator[Found]:
    """Of `model.path`."""
    name, place = specs.run.model.path, ("run", "model", "path")
    if not path.is_dir():
        why = f"model.path is '{name}', and there is no directory {path} (rule: a directory with weights)"
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name or "") is not None
        yield Found(place, why, f"hf download {name} --local-dir DIR, then model.path DIR" if hub else "")
        return
    try:
        if specs.cluster.engines.kind != "vllm":
            read_architecture(path)
        weight_files(path)
    except UsageError as error:
        yield Found(place, f"model.path: {error.message}", _or_vllm(error))


def _or_vllm(error: RollartError) -> str:
    """vLLM computes families that the embedded engine does not."""
    unsupported = "not supported" in error.message
    return f"{error.remedy}{', or ' if error.remedy else ''}engines: {{kind: vllm}}" if unsupported else error.remedy


def function_problems(specs: Resolved | Specs) -> Iterator[Found]:
    """What is wrong with the source of a reward function. Artefacts are not there yet, and do not matter here."""
    for number, function in enumerate(specs.run.functions):
        try:
            check(function, specs)
        except RollartError as error:
            yield Found(("run", "functions", number), error.message, error.remedy)


def environment_problems(specs: Resolved | Specs) -> list[Found]:
    """The same as values, in the order of the domains."""
    asked = _asked(specs)
    if asked in _WELL:
        return []
    quick: set[str] = set()
    with _path(specs.base):
        found = [problem for i in range(len(specs.run.domains)) for problem in _harness(specs, i)]
        if _looks_here(specs):
            troubles = look(made_by_hosts(specs.run), worked=_worked(specs), quick=quick.add)
            found += [_placed(specs, trouble) for trouble in troubles]
    if not _looks_here(specs) and not _elsewhere(specs):
        found += _asked_hosts(specs, quick)
    if not found:
        _WELL[asked] = quick.issuperset(made_by_hosts(specs.run))
    return found


def decided(resolved: Resolved) -> Resolved:
    """The run with `environments.workers` decided, where that depends on what its environments declare. SpecError as
    from `refuse_unlaunchable`."""
    spec = resolved.cluster.environments
    if spec.workers != UNLESS_QUICK:
        return resolved
    refuse_unlaunchable(resolved)
    environments = spec.model_copy(update={"workers": 0 if _WELL[_asked(resolved)] else "auto"})
    return replace(resolved, cluster=resolved.cluster.model_copy(update={"environments": environments}))


def _asked(specs: Resolved | Specs) -> str:
    spec = specs.cluster.environments
    key = [made_by_hosts(specs.run), hook(spec), _worked(specs), specs.base, spec.python, spec.workers]
    return json.dumps(key, default=str)


def _looks_here(specs: Resolved | Specs) -> bool:
    """True if environments are made in this process to be looked at: where they will live here, or are ours."""
    spec = specs.cluster.environments
    if spec.workers != UNLESS_QUICK:
        return not spec.workers
    paths = [str(one["environment"]) for one in made_by_hosts(specs.run).values()]
    return spec.python is None and all(path.startswith(SHIPPED) for path in paths)


def _worked(specs: Resolved | Specs) -> list[str]:
    """Domains whose worked examples the run begins with."""
    return [] if specs.run.warm_start is None else list(specs.run.warm_start.domains)


def _elsewhere(specs: Resolved | Specs) -> bool:
    runtime = specs.cluster.runtime
    return runtime.backend == "ray" and runtime.address != "local"


@contextmanager
def _path(base: str) -> Iterator[None]:
    """A spec names what lies beside it."""
    if base in sys.path:
        yield
        return
    sys.path.insert(0, base)
    try:
        yield
    finally:
        sys.path.remove(base)


def _harness(specs: Resolved | Specs, index: int) -> Iterator[Found]:
    try:
        harness_of(specs.run.domains[index], None)
    except SpecError as error:
        yield Found(("run", "domains", index, "environment"), error.message, error.remedy)


def _placed(specs: Resolved | Specs, trouble: Trouble) -> Found:
    """Which key of the specs is to blame."""
    if not trouble.domain:
        at: tuple[str | int, ...] = ("cluster", "environments", "images_args" if trouble.argument else "images")
        message, remedy = f"environments.images: {trouble.message}", ""
    else:
        index = next(i for i, d in enumerate(specs.run.domains) if d.name == trouble.domain)
        at = ("run", "domains", index, "environment_args" if trouble.argument else "environment")
        message = f"environment of domain '{trouble.domain}': {trouble.message}"
        remedy = INSTALL if "ModuleNotFoundError" in message or "ImportError" in message else ""
    if not specs.cluster.environments.workers and specs.cluster.environments.python and remedy:
        remedy = "environments.python is for hosts: set environments.workers to 1 or more"
    if trouble.argument == WARM:
        number = _worked(specs).index(trouble.domain)
        return Found(("run", "warm_start", "domains", number), f"warm_start.domains: {trouble.message}")
    named = trouble.argument not in ("", "*")
    return Found((*at, trouble.argument) if named else at, message, remedy, key=named)


def _asked_hosts(specs: Resolved | Specs, quick: set[str]) -> Iterator[Found]:
    """What the hosts' own interpreter says; domains whose environments are quick are added to `quick`."""
    spec = specs.cluster.environments
    python, blamed = spec.python or sys.executable, ("cluster", "environments", "python" if spec.python else "workers")
    asked = {
        "path": import_paths(specs),
        "domains": made_by_hosts(specs.run),
        "images": hook(spec),
        "worked": _worked(specs),
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as hosts have it
    try:
        done = _ran([python, "-m", WATCHED, str(os.getpid()), MODULE], json.dumps(asked), spec.start_s, env)
    except OSError as error:
        why = f"environments.python is '{python}', which cannot be run: {error.strerror or error}"
        yield Found(blamed, why, "name an interpreter that is there")
        return
    except subprocess.TimeoutExpired as late:
        yield _stopped(
            specs,
            _read(_text(late.stdout))[1],
            f"was not over within {spec.start_s:g} s (environments.start_s)",
            blamed,
        )
        return
    troubles, where = _read(done.stdout, quick)
    yield from (_placed(specs, trouble) for trouble in troubles)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        code = done.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        last = next((line for line in said if line.startswith("Fatal Python error")), said[-1])[:300]
        if where is None:  # not even begun
            why = f"environments.python is '{python}', under which no host could run: {last}"
            yield Found(blamed, why, "pip install rollart into it" if "'rollart" in last else "name an interpreter")
        else:
            yield _stopped(specs, where, f"{how}: {last}", blamed)


def _ran(command: Sequence[str], said: str, seconds: float, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Its end alone is waited for: a pipe would stay open as long as anything that an environment has started."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:

        def text(file: IO[bytes]) -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            code = subprocess.run(
                command, input=said.encode(), stdout=out, stderr=errors, timeout=seconds, env=env
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, seconds, text(out)) from None
        return subprocess.CompletedProcess(command, code, text(out), text(errors))


def _stopped(specs: Resolved | Specs, where: str | None, how: str, blamed: tuple[str | int, ...]) -> Found:
    """What it was at when it ended, or did not end."""
    index = next((i for i, d in enumerate(specs.run.domains) if where == f"domain '{d.name}'"), None)
    if index is not None:
        return Found(("run", "domains", index, "environment"), f"the look at the environment of {where} {how}")
    if where == "environments.images":
        return Found(("cluster", "environments", "images"), f"the look at {where} {how}")
    return Found(blamed, f"the look at the environments {how}")


def _read(said: str, quick: set[str] | None = None) -> tuple[Sequence[Trouble], str | None]:
    """What was found, and what was looked at last; None if nothing was."""
    troubles, where = [], None
    for line in said.splitlines():
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off
            break
        if "trouble" in told:
            troubles.append(Trouble(*told["trouble"]))
        elif "quick" in told:
            if quick is not None:
                quick.add(told["quick"])
        else:
            where = str(told["looking"])
    return troubles, where


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
