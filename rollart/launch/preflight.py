"""Checks before the first part of a launch starts, and the warnings and lines that accompany them. `validate`, the dry
run and the launch share one function.

The model's configuration and weight headers are read as the embedded engine reads them, the tokenizer is loaded, and
the reward functions are packed as for their workers. Environments are checked where they will live: the controller's in
this process, those of hosts once in a process of the hosts' interpreter, with a time limit. Then every part's program
is described as the launch describes it. Programs and files on other machines are not checked, and only the launch asks
other machines; `unchecked_remotes` names these questions.

Warnings are about runs that can start and about which the user has to know something. The dry run adds the commands of
vLLM engines, number formats of parts on GPUs, the weight path, and the placement of function workers.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from placement.types import ROLLOUT_ROLES, Role
from rollart.adapters.env_hosts.checks import MODULE, WARM_START_ARGUMENT, EnvironmentProblem, check_environments
from rollart.adapters.text import HubTokenizer
from rollart.adapters.webhook import webhook_url
from rollart.architecture import (
    ATTENTION_LINEAR,
    LINEAR,
    architecture_of,
    may_have_experts,
    read_architecture,
    refuse_longer_context,
    refuse_truncated,
    weight_files,
    weight_names,
)
from rollart.errors import RollartError, SpecError, UsageError
from rollart.launch.broadcasts import collective_backend
from rollart.launch.functions import (
    build_lines,
    check_providers,
    check_secrets,
    import_warnings,
    translated_errors,
)
from rollart.launch.hosts import function_actor, hosted_domains, image_hook_config, import_paths, initial_function_hosts
from rollart.launch.layout import attached_urls, engine_actor, engine_command, torch_device, trainer_actors
from rollart.launch.prepare import (
    domain_chats,
    given_samples,
    harness_factory,
    prepare_tokenizer,
    refuse_incomplete,
    runs_remotely,
    stop_token_ids,
    tokenizer_directory,
    trainer_config,
)
from rollart.launch.requirements import CPU_INDEX, refuse_missing, refuse_without_cuda, torch_build
from rollart.launch.resume import fork_problems, tokenizer_difference
from rollart.launch.rewards import check_function, function_packages, packages_and_stateful, release_provider
from rollart.launch.strategies import refuse_lending
from rollart.settings.algorithms import changed_switches
from rollart.settings.base import host_and_port
from rollart.settings.cluster import UNLESS_QUICK
from rollart.settings.load import SpecSources, raise_findings
from rollart.settings.planning import (
    Specs,
    adapter_bytes,
    adapter_count,
    hub_model,
    initial_config,
    model_directory,
    pinned,
    run_shape,
)
from rollart.settings.resolve import Resolved, engine_dtype, resolve_specs, trainer_dtype
from rollart.settings.rules import RuleViolation
from rollart.user_code import importable
from serverless.deploy.package import Package
from serverless.spec import RESERVED_VARIABLE

_launchable: Resolved | None = None
"""The last run that `launchable` returned to a launch."""

_CHECKED: dict[str, bool] = {}
"""Environments that passed their check in this process, with True if all of them declare themselves quick. The command
line checks before it makes a run's directory; the run checks again for direct callers of `launch`."""

SHIPPED_PREFIX = "rollart."
"""Shipped environments may be imported in any process."""

PARENT_DEATH_MODULE = "rollart.lifeline"
"""Runs a module that ends with this process."""

PORT_WAIT_S, PORT_POLL_S = 5.0, 0.25
"""Seconds to wait for a port in use, and between tries: parts end within 3 s of their controller."""

INSTALL_REMEDY = "install its dependencies where environments live: see docs/environments.md"

LAMBDA_PACKAGE_MB = 250
"""Unpacked size of a function's zip on AWS Lambda."""

LARGE_DISTRIBUTIONS = frozenset({"torch", "tensorflow", "jax", "jaxlib", "vllm"})
"""Distributions larger than that by themselves."""

LONG_RUN_STEPS = 200
"""Steps from which a run is worth more than its last two versions. A guess: hours on GPUs, minutes on cores."""

ENVIRONMENT_VARIABLE = re.compile(r"^(?:os\.)?(?:environ\[|environ\.get\(|getenv\()['\"](\w+)['\"]")


def launchable(specs: Specs, where: SpecSources | None = None, *, others: bool = True, begun: bool = False) -> Resolved:
    """The run that a launch would start. `RollartError` for anything that a launch would refuse. `where`: the spec
    documents, for line numbers in errors. `others`: ask other machines as well. `begun`: a resume, which no longer
    needs the version that it forked."""
    global _launchable
    refuse_missing(specs)
    if not begun:
        raise_findings([*fork_problems(specs)], where)
    refuse_files(specs, where, launch=True)
    specs = pinned(specs)
    resolved = specs if isinstance(specs, Resolved) else resolve_specs(specs)
    token = resolved.cluster.runtime.token
    if token is not None and not Path(token).is_file():
        raise SpecError(f"runtime.token is {token}, which is no file", remedy="copy the token of the cluster's head")
    refuse_lending(resolved)
    with importable(resolved.base):
        _refuse_programs(resolved)
    check_providers(resolved.cluster.functions, [function.name for function in resolved.run.functions])
    check_secrets(resolved.cluster.functions, resolved.functions.values(), Path(resolved.base))
    if resolved.run.budget.notify is not None:
        webhook_url(resolved.run.budget.notify)
    if resolved.cluster.engines.kind == "vllm":  # imported late for the sake of other runs
        from rollart.launch.vllm import refuse_dead_servers, refuse_without_vllm

        refuse_without_vllm(resolved)
        if others:
            refuse_dead_servers(resolved)
    _launchable = resolved if others else None
    return resolved


def refuse_unlaunchable(resolved: Resolved, *, begun: bool = False) -> None:
    """The same check, skipped for a run that `launchable` has just returned."""
    if resolved is not _launchable:
        launchable(resolved, begun=begun)


def refuse_files(specs: Specs, where: SpecSources | None = None, *, launch: bool = False) -> None:
    """SpecError with a line per problem in files and code that the specs name: the model, reward functions,
    environments, an image hook or interpreter. `launch`: the model must have weights or be initialised in place; a
    configuration suffices for plans."""
    with importable(specs.base):
        found = list(model_problems(specs, launch=launch))
        for number, function in enumerate(specs.run.functions):  # artefacts do not exist yet, and are not needed here
            try:
                check_function(function, specs)
            except RollartError as error:
                found.append(RuleViolation(("run", "functions", number), error.message, error.remedy))
    raise_findings([*found, *environment_problems(specs)], where)


def unchecked_remotes(resolved: Resolved) -> Iterator[str]:
    """Questions that a launch asks other machines, each as a clause with whether."""
    cluster = resolved.cluster
    if cluster.runtime.backend == "ray" and runs_remotely(resolved) and cluster.runtime.address != "start":
        yield f"whether a Ray cluster answers at {cluster.runtime.address}, and has nodes for the plan"
    for url in cluster.engines.attach:
        yield f"whether {url} serves the model"
    for provider in cluster.functions.chain if resolved.run.functions else ():
        if provider != "local":
            yield f"whether {provider} answers, and takes the credentials of this machine"
    for function in resolved.run.functions:
        if function.function is not None and function.name not in resolved.releases:
            provider = release_provider(resolved)
            yield f"whether {function.function} is deployed to {provider}; its settings are known once it is drawn"


def is_plan_only(specs: Specs) -> bool:
    """True for a model that is only good for plans: a configuration without weights, which cannot be launched."""
    return specs.run.model.path is None and specs.run.model.init is None


def model_problems(specs: Specs, *, launch: bool = True) -> Iterator[RuleViolation]:
    """Problems of the policy's directory, configuration and tokenizer."""
    model = specs.run.model
    try:
        if launch or not is_plan_only(specs):
            refuse_incomplete(model)
    except SpecError as error:
        yield RuleViolation(("run", "model"), error.message, error.remedy)
    vocabulary: int | None = None
    linear: Sequence[str] = LINEAR
    elsewhere = runs_remotely(specs) and model.tokenizer is not None and hub_model(model, specs.base) is None
    if model.path is not None and not elsewhere:
        found = list(_directory_problems(specs, model.path))
        yield from found
        if found:
            return
        if may_have_experts(model_directory(model, specs.base)):
            linear = ATTENTION_LINEAR
    if model.init is not None:
        try:
            init = initial_config(model.init, specs.base)
            if specs.cluster.engines.kind != "vllm":
                architecture = architecture_of(init, "model.init")
                refuse_longer_context(architecture, model.context)
                linear = LINEAR if architecture.experts is None else ATTENTION_LINEAR
            vocabulary = init.get("vocab_size")
        except (SpecError, UsageError) as error:
            yield RuleViolation(("run", "model", "init"), error.message, _remedy_with_vllm(error))
    yield from _tokenizer_problems(specs, vocabulary)
    yield from _reference_problems(specs)
    yield from _training_problems(specs, linear)


def environment_problems(specs: Specs) -> list[RuleViolation]:
    """Problems of the environments, in the order of the domains."""
    key = _check_key(specs)
    if key in _CHECKED:
        return []
    quick: set[str] = set()
    with importable(specs.base):
        found = []
        for index, domain in enumerate(specs.run.domains):
            try:
                harness_factory(domain, None)
            except SpecError as error:
                found.append(RuleViolation(("run", "domains", index, "environment"), error.message, error.remedy))
        if _checks_in_process(specs):
            problems = check_environments(hosted_domains(specs.run), worked=_warm_start_domains(specs), quick=quick.add)
            found += [_locate_problem(specs, problem) for problem in problems]
    if not _checks_in_process(specs) and not runs_remotely(specs):
        found += _check_on_host_interpreter(specs, quick)
    if not found:
        _CHECKED[key] = quick.issuperset(hosted_domains(specs.run))
    return found


def decide_workers(resolved: Resolved) -> Resolved:
    """The run with `environments.workers` decided if it depends on the environments' declarations. SpecError as from
    `refuse_unlaunchable`."""
    spec = resolved.cluster.environments
    if spec.workers != UNLESS_QUICK:
        return resolved
    raise_findings(environment_problems(resolved))
    environments = spec.model_copy(update={"workers": 0 if _CHECKED[_check_key(resolved)] else "auto"})
    return replace(resolved, cluster=resolved.cluster.model_copy(update={"environments": environments}))


def launch_warnings(specs: Specs) -> Iterator[str]:
    """The warnings, one line each."""
    cluster = specs.cluster
    if cluster.runtime.backend == "ray" or cluster.engines.kind == "vllm":
        yield (
            "engines and the trainer answer HTTP without a token, and take requests of any host that reaches their "
            "ports: keep those ports inside the cluster's network"
        )
    kept = specs.run.checkpoints
    if specs.run.steps >= LONG_RUN_STEPS and kept.every is None and kept.best_by is None:
        yield (
            f"of {specs.run.steps} versions the last {kept.keep} are kept: a policy that collapses in between has no "
            "earlier version to return to. Set checkpoints.every or checkpoints.best_by"
        )
    training = specs.run.training
    for key, value, own in changed_switches(training, specs.run.domains):
        yield f"{key} is {value!r}, given beside training.algorithm '{training.algorithm}', whose own is {own!r}"
    yield from _chat_warnings(specs)
    cores = all(pool.device == "cpu" for pool in cluster.pools)
    if cores and cluster.runtime.backend == "local" and torch_build() == "cuda":
        yield (
            "torch is installed with gigabytes of CUDA packages, and the cluster has CPU cores alone: pip install "
            f"--index-url {CPU_INDEX} torch, and uninstall the nvidia packages"
        )
    with contextlib.suppress(RollartError):  # packing errors are reported elsewhere
        packages, stateful = packages_and_stateful(specs, {})
        for package in packages:
            yield from (f"function '{package.spec.name}': {text}" for text in _package_warnings(package, specs))
        for name, reason in stateful.items():
            yield f"function '{name}' depends on earlier calls, so it runs beside the environments: {reason}"


def _chat_warnings(specs: Specs) -> Iterator[str]:
    if all(domain.chat is None for domain in specs.run.domains):
        return
    with contextlib.suppress(RollartError), tempfile.TemporaryDirectory() as made, importable(specs.base):
        chats = domain_chats(specs, prepare_tokenizer(specs, Path(made)))
        for domain, chat in zip(specs.run.domains, chats, strict=True):
            if chat is not None and chat.drops_thoughts:
                yield (
                    f"domain '{domain.name}': the chat template leaves thoughts (<think>) out of earlier answers. "
                    "Episodes keep every token that was sampled, so in later turns the policy sees thoughts that it "
                    "will not see where the template is applied to whole conversations"
                )


def dry_run_lines(resolved: Resolved) -> Iterator[str]:
    """One line per engine and one for the trainer, none for embedded parts in float32 on cores; one for broadcasts, and
    one per host of function workers."""
    ours, urls = resolved.cluster.engines.kind != "vllm", attached_urls(resolved)
    for assignment in resolved.plan.of(*ROLLOUT_ROLES):
        if ours:
            device = torch_device(resolved, assignment)
            yield from _dtype_line(assignment.name, device, engine_dtype(resolved, device))
            continue
        command = engine_command(resolved, assignment)
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.env.items())
        line = f"{env} vllm serve MODEL {shlex.join(command.args)}"
        url = urls.get(assignment.name)
        yield f"{assignment.name}: {line if url is None else f'{url}, which runs already, started with {line}'}"
    for assignment in resolved.plan.of(Role.TRAINER):
        if resolved.cluster.trainer.external is None:
            device = torch_device(resolved, assignment)
            yield from _dtype_line(assignment.name, device, trainer_dtype(resolved, device))
    yield from _adapter_line(resolved)
    if resolved.run.weights.collective is not None:
        yield f"weights: broadcast over {collective_backend(resolved)}"
    for name in initial_function_hosts(resolved):
        actor = function_actor(resolved, Path(), name, "")
        labels = " ".join(f"{key}={value}" for key, value in actor.labels.items())
        resources = " ".join(f"{amount:g} {kind}" for kind, amount in actor.resources.items())
        where = f"in {resources}" if resources else "beside its other parts"
        yield f"{name}: function workers on a node with {labels}, {where}"
    with translated_errors():
        for package in function_packages(resolved, {}):
            yield from build_lines(package, resolved.cluster.functions)


def _adapter_line(resolved: Resolved) -> Iterator[str]:
    if resolved.run.training.lora is None:
        return
    shape, width = run_shape(resolved), 4 if resolved.run.weights.dtype == "trained" else 2
    whole, adapters = width * shape.parameters / 1e6, adapter_bytes(resolved.run, shape)
    if adapters is None:
        yield f"weights: {whole:,.4g} MB a version, adapters merged"
    else:
        count = adapter_count(resolved.run)
        of = f"{count} adapters" if count > 1 else "adapters"
        yield f"weights: {adapters / 1e6:,.4g} MB of {of} a version, and {whole:,.4g} MB below them once"


def _refuse_programs(resolved: Resolved) -> None:
    """SpecError for parts whose programs cannot be described, or cannot run on this machine."""
    cluster, plan = resolved.cluster, resolved.plan
    engines = list(plan.of(*ROLLOUT_ROLES))
    with tempfile.TemporaryDirectory() as name:
        trainer_actors(resolved, Path(name), trainer_config(resolved, Path(name), Path(name)))
        for engine in engines:
            if engine.name not in attached_urls(resolved):
                engine_actor(resolved, Path(name), engine)
    if resolved.run.weights.collective is not None:
        collective_backend(resolved)
    if cluster.runtime.port:
        _refuse_unavailable_address(f"0.0.0.0:{cluster.runtime.port}", "runtime.port")
    if cluster.runtime.backend != "local":
        return
    if cluster.trainer.external is not None:
        _refuse_unavailable_address(cluster.trainer.external, "trainer.external")
    else:
        engines += plan.of(Role.TRAINER)
    for part in engines if cluster.engines.kind != "vllm" else ():
        if torch_device(resolved, part) == "cuda":
            refuse_without_cuda(f"{part.name} on pool '{part.pool}'")


def _refuse_unavailable_address(address: str, key: str) -> None:
    """SpecError for a local address that a server cannot bind. A port in use is waited for, since a part of a killed
    controller keeps its port until it ends as well."""
    for left in reversed(range(round(PORT_WAIT_S / PORT_POLL_S))):
        try:
            with socket.create_server(host_and_port(address)):
                return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and left:
                threading.Event().wait(PORT_POLL_S)
                continue
            why = f"{key}: no server can listen on {address}: {error.strerror or error}"
            raise SpecError(why, remedy="give an address of this machine with a free port, or port 0 for any") from None


def _tokenizer_problems(specs: Specs, vocabulary: int | None) -> Iterator[RuleViolation]:
    """`vocabulary`: number of embeddings of a model that is initialised in place."""
    model, key = specs.run.model, "path" if specs.run.model.tokenizer is None else "tokenizer"
    named = model.tokenizer or model.path
    if named is None:
        return
    if ":" not in named and not (tokenizer_directory(specs) / "tokenizer.json").is_file():
        why = f"model.{key} is '{named}', where there is no tokenizer.json (rule: a directory with one)"
        yield RuleViolation(
            ("run", "model", key), why, "save the tokenizer beside the model, or name it in model.tokenizer"
        )
        return
    if is_plan_only(specs):
        return
    with tempfile.TemporaryDirectory() as made:
        try:
            directory = prepare_tokenizer(specs, Path(made))
            if why := tokenizer_difference(specs, directory):
                yield RuleViolation(("run", "model", key), why, "name that run's tokenizer in model.tokenizer")
            tokenizer = HubTokenizer(directory)
        except SpecError as error:
            yield RuleViolation(("run", "model", key), error.message, error.remedy)
            return
        try:
            domain_chats(specs, tokenizer.directory)
        except SpecError as error:
            number = next(i for i, domain in enumerate(specs.run.domains) if f"'{domain.name}'" in error.message)
            yield RuleViolation(("run", "domains", number, "chat"), error.message, error.remedy)
        try:
            given_samples(specs, tokenizer.directory)
        except SpecError as error:
            yield RuleViolation(("run", "training", "data"), error.message, error.remedy)
    for number, domain in enumerate(specs.run.domains):
        try:
            stop_token_ids(domain, tokenizer)
        except SpecError as error:
            yield RuleViolation(("run", "domains", number, "stop"), error.message, error.remedy)
    if vocabulary is not None and tokenizer.vocabulary_size > vocabulary:
        why = f"model.init has vocab_size {vocabulary}, and the tokenizer {tokenizer.vocabulary_size} tokens"
        yield RuleViolation(("run", "model", "init"), f"{why} (rule: an embedding for each)")


def _training_problems(specs: Specs, linear: Sequence[str]) -> Iterator[RuleViolation]:
    """Settings of `training` that depend on the model, whose `linear` modules take adapters, and on the engines."""
    if specs.run.training.routing_replay and specs.cluster.engines.kind == "vllm":
        yield RuleViolation(
            ("run", "training", "routing_replay"),
            "training.routing_replay is true (rule: with embedded engines; those of kind vllm report no experts)",
            "leave it out",
        )
    if specs.run.deterministic and (specs.cluster.engines.kind == "vllm" or specs.cluster.trainer.external is not None):
        why = "deterministic is true (rule: with embedded engines and the embedded trainer)"
        yield RuleViolation(("run", "deterministic"), why, "leave it out")
    for index, domain in enumerate(specs.run.domains):
        if domain.adapter is not None and (
            specs.cluster.engines.kind == "vllm" or specs.cluster.trainer.external is not None
        ):
            why = f"domain '{domain.name}' has the adapter '{domain.adapter}' (rule: with embedded engines and the "
            yield RuleViolation(
                ("run", "domains", index, "adapter"),
                why + "embedded trainer)",
                "leave it out: all domains share one adapter then",
            )
            break
    lora = specs.run.training.lora
    if lora is not None and specs.cluster.engines.kind != "vllm" and lora.targets != ["all-linear"]:
        for name in lora.targets:
            if name.rpartition(".")[2] not in linear:
                why = f"training.lora.targets has '{name}' (rule: all-linear, or linear modules: {', '.join(linear)})"
                yield RuleViolation(("run", "training", "lora", "targets"), why)


def _directory_problems(specs: Specs, name: str) -> Iterator[RuleViolation]:
    """Problems of `model.path`, which is `name`. Errors for which the spec is not to blame are raised."""
    model, key = specs.run.model, ("run", "model", "path")
    hub = hub_model(model, specs.base)
    try:
        path = model_directory(model, specs.base)
    except SpecError as error:
        found = "revision" if error.message.startswith("model.revision") else "path"
        yield RuleViolation(("run", "model", found), error.message, error.remedy)
        return
    if hub is None and model.revision is not None:
        why = f"model.revision is '{model.revision}', and model.path a directory (rule: of models of the Hub alone)"
        yield RuleViolation(("run", "model", "revision"), why)
        return
    if not path.is_dir():
        rule = "a directory with weights, or the id OWNER/NAME of a model of the Hugging Face Hub"
        yield RuleViolation(key, f"model.path is '{name}', and there is no directory {path} (rule: {rule})")
        return
    try:
        if specs.cluster.engines.kind != "vllm":
            refuse_longer_context(read_architecture(path), model.context)
        if hub is not None and not all((path / one).exists() for one in weight_names(path)):
            missing = set(weight_names(path)) - replace(hub, revision=path.name).sizes(weight_names(path)).keys()
            if missing:
                raise UsageError(f"{name} has no {min(missing)}", remedy="choose a model with safetensors")
            return
        for file in weight_files(path):
            refuse_truncated(file)
    except UsageError as error:
        yield RuleViolation(key, f"model.path: {error.message}", _remedy_with_vllm(error))


def _reference_problems(specs: Specs) -> Iterator[RuleViolation]:
    """A reference policy that is not of the run is a model with the policy's vocabulary. The trainer asks an endpoint
    for its own at its start."""
    name, key = specs.run.training.loss.reference, ("run", "training", "loss", "reference")
    if not isinstance(name, str) or runs_remotely(specs):
        return
    shown = f"training.loss.reference is '{name}'"
    try:
        size = _vocabulary_size(Path(specs.base) / name)
    except (OSError, ValueError, AttributeError) as error:
        yield RuleViolation(key, f"{shown}, whose config.json is not readable: {error} (rule: a model's directory)")
        return
    model, own = specs.run.model, None
    if model.init is not None:
        own = initial_config(model.init, specs.base).get("vocab_size")
    elif model.path is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError, SpecError):  # a problem of its own
            own = _vocabulary_size(model_directory(model, specs.base))
    if own is not None and size != own:
        yield RuleViolation(key, f"{shown} with vocab_size {size} (rule: {own}, the policy's)")


def _vocabulary_size(directory: Path) -> int | None:
    """Raises `OSError`, `ValueError` or `AttributeError` for a config.json that is missing or not readable."""
    found: int | None = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    return found


def _remedy_with_vllm(error: RollartError) -> str:
    """Add vLLM to the remedy for model families that the embedded engine does not support."""
    unsupported = "not supported" in error.message
    return f"{error.remedy}{', or ' if error.remedy else ''}engines: {{kind: vllm}}" if unsupported else error.remedy


def _check_key(specs: Specs) -> str:
    spec = specs.cluster.environments
    key = [
        hosted_domains(specs.run),
        image_hook_config(spec),
        _warm_start_domains(specs),
        specs.base,
        spec.python,
        spec.workers,
    ]
    return json.dumps(key, default=str)


def _checks_in_process(specs: Specs) -> bool:
    """True if environments are created in this process for the check: they will live here, or are shipped ones."""
    spec = specs.cluster.environments
    if spec.workers != UNLESS_QUICK:
        return not spec.workers
    paths = [str(one["environment"]) for one in hosted_domains(specs.run).values()]
    return spec.python is None and all(path.startswith(SHIPPED_PREFIX) for path in paths)


def _warm_start_domains(specs: Specs) -> list[str]:
    """Domains whose worked examples the warm start uses."""
    return [] if specs.run.warm_start is None else list(specs.run.warm_start.domains)


def _locate_problem(specs: Specs, problem: EnvironmentProblem) -> RuleViolation:
    """The problem, located at the responsible key of the specs."""
    if not problem.domain:
        key: tuple[str | int, ...] = ("cluster", "environments", "images_args" if problem.argument else "images")
        message, remedy = f"environments.images: {problem.message}", ""
    else:
        index = next(i for i, d in enumerate(specs.run.domains) if d.name == problem.domain)
        key = ("run", "domains", index, "environment_args" if problem.argument else "environment")
        message = f"environment of domain '{problem.domain}': {problem.message}"
        remedy = INSTALL_REMEDY if "ModuleNotFoundError" in message or "ImportError" in message else ""
    if not specs.cluster.environments.workers and specs.cluster.environments.python and remedy:
        remedy = "environments.python is for hosts: set environments.workers to 1 or more"
    if problem.argument == WARM_START_ARGUMENT:
        number = _warm_start_domains(specs).index(problem.domain)
        return RuleViolation(("run", "warm_start", "domains", number), f"warm_start.domains: {problem.message}")
    named = problem.argument not in ("", "*")
    return RuleViolation((*key, problem.argument) if named else key, message, remedy, key=named)


def _check_on_host_interpreter(specs: Specs, quick: set[str]) -> Iterator[RuleViolation]:
    """Problems in the hosts' own interpreter. Domains with quick environments are added to `quick`."""
    spec = specs.cluster.environments
    python, key = spec.python or sys.executable, ("cluster", "environments", "python" if spec.python else "workers")
    request = {
        "path": import_paths(specs),
        "domains": hosted_domains(specs.run),
        "images": image_hook_config(spec),
        "worked": _warm_start_domains(specs),
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as on hosts
    try:
        done = _run_check(
            [python, "-m", PARENT_DEATH_MODULE, str(os.getpid()), MODULE], json.dumps(request), spec.start_s, env
        )
    except OSError as error:
        why = f"environments.python is '{python}', which cannot be run: {error.strerror or error}"
        yield RuleViolation(key, why, "name an interpreter that is there")
        return
    except subprocess.TimeoutExpired as late:
        yield _interrupted_check(
            specs,
            _parse_check_output(str(late.stdout))[1],
            f"was not over within {spec.start_s:g} s (environments.start_s)",
            key,
        )
        return
    problems, where = _parse_check_output(done.stdout, quick)
    yield from (_locate_problem(specs, problem) for problem in problems)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        code = done.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1])[:300]
        if where is None:  # the check did not begin
            why = f"environments.python is '{python}', under which no host could run: {last}"
            yield RuleViolation(
                key, why, "pip install rollart into it" if "'rollart" in last else "name an interpreter"
            )
        else:
            yield _interrupted_check(specs, where, f"{how}: {last}", key)


def _run_check(
    command: Sequence[str], stdin: str, seconds: float, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the command to its exit. Output goes to files, since a pipe would stay open as long as any process that an
    environment has started."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:

        def text(file: IO[bytes]) -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            code = subprocess.run(
                command, input=stdin.encode(), stdout=out, stderr=errors, timeout=seconds, env=env
            ).returncode
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, seconds, text(out)) from None
        return subprocess.CompletedProcess(command, code, text(out), text(errors))


def _interrupted_check(specs: Specs, where: str | None, how: str, key: tuple[str | int, ...]) -> RuleViolation:
    """The step at which the check ended or timed out."""
    index = next((i for i, d in enumerate(specs.run.domains) if where == f"domain '{d.name}'"), None)
    if index is not None:
        return RuleViolation(("run", "domains", index, "environment"), f"the look at the environment of {where} {how}")
    if where == "environments.images":
        return RuleViolation(("cluster", "environments", "images"), f"the look at {where} {how}")
    return RuleViolation(key, f"the look at the environments {how}")


def _parse_check_output(output: str, quick: set[str] | None = None) -> tuple[Sequence[EnvironmentProblem], str | None]:
    """The problems found, and the last step of the check; None if it did not begin."""
    problems, where = [], None
    for line in output.splitlines():
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:  # a truncated line
            break
        if "trouble" in message:
            problems.append(EnvironmentProblem(*message["trouble"]))
        elif "quick" in message:
            if quick is not None:
                quick.add(message["quick"])
        else:
            where = str(message["looking"])
    return problems, where


def _package_warnings(package: Package, specs: Specs) -> Iterator[str]:
    yield from package.warnings
    if specs.cluster.functions.chain == ("http",):  # the host's own code
        return
    declared = package.spec.env.keys() | set(package.spec.secrets)
    for variable in sorted(_environment_variables(package) - declared):
        if RESERVED_VARIABLE.match(variable):  # the runtime sets it
            continue
        yield (
            f"it reads the environment variable {variable}, which it does not declare: functions have the variables of "
            "their `env` and `secrets` alone"
        )
    if package.spec.gpu and specs.cluster.functions.chain == ("local",):
        yield f"it asks for a GPU ({package.spec.gpu}): local workers have what this machine has, and are billed no GPU"
    remote = [name for name in specs.cluster.functions.chain if name in ("aws_lambda", "modal")]
    if not remote:
        return
    pinned = {_canonical(re.split(r"[=<>!~ \[;@]", line)[0]) for line in package.spec.requirements}
    archive = package.spec.image is None
    if "aws_lambda" in remote and archive and (large := sorted(LARGE_DISTRIBUTIONS & pinned)):
        limit = f"the {LAMBDA_PACKAGE_MB} MB that AWS Lambda unpacks"
        yield f"{large[0]} is larger than {limit}: give the function an image ({{}} will do), or use another provider"
    yield from import_warnings(package, remote)


def _environment_variables(package: Package) -> set[str]:
    """The environment variables that are read."""
    sources = [data for name, data in package.files.items() if name.startswith("function/") and name.endswith(".py")]
    nodes = (node for data in sources for node in ast.walk(ast.parse(data)))
    read = (ENVIRONMENT_VARIABLE.match(ast.unparse(n)) for n in nodes if isinstance(n, ast.Subscript | ast.Call))
    return {match[1] for match in read if match}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _dtype_line(name: str, device: str, dtype: str) -> Iterator[str]:
    if (device, dtype) != ("cpu", "float32"):
        yield f"{name}: computes in {dtype} on {device}"
