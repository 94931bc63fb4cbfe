"""Prerequisites of the parts: tokenizer, trainer config, function packages, environments."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.types import Role
from rollart.adapters.chat import EpisodeChat
from rollart.adapters.conversations import read_samples
from rollart.adapters.envs.in_process import in_process
from rollart.adapters.envs.worked import METHOD, checked_example, worked_example_domain
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.text import HubTokenizer
from rollart.architecture import weight_names
from rollart.control.domain import Domain, derive_seed
from rollart.errors import EnvironmentFault, PartDied, RunFailed, SpecError, one_line
from rollart.hub import SMALL_FILES
from rollart.launch.layout import torch_device, trainer_ranks
from rollart.leases import Expiry, Leases
from rollart.model import TrainSample
from rollart.ports import ChatPrompts, EnvironmentFactory, HarnessFactory, RunEvent
from rollart.settings.planning import Specs, data_digest, hub_model, initial_config, model_directory
from rollart.settings.resolve import Resolved, trainer_dtype
from rollart.settings.run import DomainSpec, ModelSpec
from rollart.settings.training import CreditSpec, ImitationSpec, ParallelConfig, PolicyConfig, TrainerConfig
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.user_code import UserCodeGuard, guard

if TYPE_CHECKING:
    from rollart.adapters.proxy.harness import HarnessRunner  # its server is not needed to check a spec


CONCURRENT_EXAMPLES, EXAMPLE_TRIES = 16, 3
"""Concurrent requests for worked examples to hosts, and tries for each: a host may end during a request."""

MODEL_COPY = "model"
"""Directory of a run's directory with the files of a model of the Hub."""

FETCH_LINE_S = 5.0
"""Seconds between two progress lines of a download."""


@guard
def import_attribute(path: str, purpose: str) -> Any:
    """The object at `package.module:attribute`. `purpose` appears in the `SpecError`."""
    module, _, name = path.partition(":")
    try:
        with UserCodeGuard():
            holder = importlib.import_module(module)
    except ImportError as error:
        raise SpecError(
            f"{purpose} '{path}' cannot be imported: {error}",
            remedy="install it, or run from the directory that holds it",
        ) from None
    except Exception as error:  # a user's module may raise anything on import
        raise SpecError(f"{purpose} '{path}' cannot be imported: {one_line(error)}", remedy=f"mend {module}") from None
    if not hasattr(holder, name):
        raise SpecError(f"{purpose} '{path}': module {module} has no '{name}'")
    return getattr(holder, name)


def refuse_incomplete(model: ModelSpec) -> None:
    """`SpecError` for a model without weights (good for plans only) or without a tokenizer."""
    if model.path is None and model.init is None:
        raise SpecError(
            "model has neither 'path' nor 'init' (rule: a run needs one; 'config' alone is for plans)",
            remedy="give model.path a directory with weights, or model.init a configuration",
        )
    if model.tokenizer is None and model.path is None:
        raise SpecError("model.init has no tokenizer", remedy="give model.tokenizer a directory or a producer")


def prepare_tokenizer(resolved: Specs, run_dir: Path) -> Path:
    """The directory with tokenizer.json: the spec's, the model's, or the one of a producer, written into the run
    directory."""
    model = resolved.run.model
    refuse_incomplete(model)
    if model.tokenizer is not None and ":" in model.tokenizer:
        directory = run_dir / "tokenizer"
        if not (directory / "tokenizer.json").exists():
            temporary = directory.with_name("tokenizer.new")  # the output of a killed producer is never used
            shutil.rmtree(temporary, ignore_errors=True)
            _write_tokenizer(model.tokenizer, temporary)
            if not (temporary / "tokenizer.json").exists():
                raise SpecError(f"model.tokenizer '{model.tokenizer}' wrote no tokenizer.json into its directory")
            shutil.rmtree(directory, ignore_errors=True)
            temporary.rename(directory)
        return directory
    return tokenizer_directory(resolved) if model.tokenizer is not None else run_model(resolved, run_dir)


def tokenizer_directory(specs: Specs) -> Path:
    """The directory that `model.tokenizer`, or else `model.path`, names; it exists or not."""
    model = specs.run.model
    return model_directory(model, specs.base) if model.tokenizer is None else Path(specs.base) / model.tokenizer


def run_model(specs: Specs, run_dir: Path) -> Path:
    """The directory of `model.path` for the parts of a run: the copy that `fetch_model` made, if there is one."""
    copy = run_dir / MODEL_COPY
    return copy if copy.is_dir() else model_directory(specs.run.model, specs.base)


def runs_remotely(specs: Specs) -> bool:
    """True if parts run on other machines."""
    runtime = specs.cluster.runtime
    return runtime.backend == "ray" and runtime.address != "local"


async def fetch_model(specs: Specs, run_dir: Path, progress: Callable[[RunEvent], None]) -> None:
    """Fetch the weights of a model of the Hub into its cache; on a cluster of several machines also copy (or link) its
    files into the run's directory, which all nodes share. Nothing to do for other models, and for an external trainer.
    Errors as of `HubModel`. Cancelled, it stops at once; complete files stay."""
    hub = hub_model(specs.run.model, specs.base)
    if hub is None or specs.cluster.trainer.external is not None or (run_dir / MODEL_COPY).is_dir():
        return
    source, loop = hub.snapshot(), asyncio.get_running_loop()
    hub = replace(hub, revision=source.name)
    missing = [name for name in weight_names(source) if not (source / name).exists()]
    total = arrived = 0
    error, stopped, over = list[Exception](), threading.Event(), asyncio.Event()

    def count(n: int) -> None:
        nonlocal arrived
        arrived += n
        if stopped.is_set():
            raise RunFailed(f"the download of {hub.id} was stopped")

    def work() -> None:
        nonlocal total
        try:
            total = sum(hub.sizes(missing).values()) if missing else 0
            hub.fetch(missing, count)
            if runs_remotely(specs):
                _copy_model(source, run_dir / MODEL_COPY)
        except Exception as caught:
            error.append(caught)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(over.set)

    # A daemon thread, not an executor's: after a Ctrl-C the process does not wait for gigabytes.
    threading.Thread(target=work, name=f"weights of {hub.id}", daemon=True).start()
    try:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FETCH_LINE_S):
                    await over.wait()
            if missing:
                progress(RunEvent(loop.time(), "model_fetching", hub.id, {"bytes": arrived, "of": total}))
    finally:
        stopped.set()
    if error:
        raise error[0]


def _copy_model(source: Path, target: Path) -> None:
    """Link or copy a snapshot's small files and safetensors; `target` appears when it is complete."""
    temporary = target.with_name(f"{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in (*SMALL_FILES, *weight_names(source)):
        if (source / name).exists():
            file = (source / name).resolve()  # a link into the cache's blobs, which other nodes may not have
            try:
                os.link(file, temporary / name)
            except OSError:  # another file system
                shutil.copyfile(file, temporary / name)
    temporary.rename(target)


@guard
def _write_tokenizer(producer: str, directory: Path) -> None:
    write = import_attribute(producer, "model.tokenizer")
    try:
        with UserCodeGuard():
            write(directory)
    except Exception as error:
        raise SpecError(
            f"model.tokenizer '{producer}' failed: {one_line(error, 500)}", remedy=f"mend {producer}"
        ) from None


def trainer_config(resolved: Resolved, run_dir: Path, tokenizer: Path) -> Path:
    """Write the trainer's `trainer.json`; its path."""
    run, trainer = resolved.run, resolved.plan.of(Role.TRAINER)[0]
    shape, device = resolved.cluster.trainer, torch_device(resolved, trainer)
    if run.model.path is not None:
        model = PolicyConfig(path=str(run_model(resolved, run_dir)))
    else:
        assert run.model.init is not None, "refused before"
        model = PolicyConfig(init=initial_config(run.model.init, resolved.base), seed=run.seed)
    imitation = run.warm_start.model_dump(include=set(ImitationSpec.model_fields)) if run.warm_start else {}
    most = {d.name: d.max_turns * d.max_tokens for d in run.domains}
    training = run.training.model_dump()
    if run.training.data is not None:
        training["epochs"] = 1  # passes over the file, which the steps make
    if run.training.loss.aggregation == "constant" and run.training.loss.length is None:
        training["loss"]["length"] = max(most.values())
    if isinstance(run.training.loss.reference, str):
        training["loss"]["reference"] = str(Path(resolved.base) / run.training.loss.reference)
    config = TrainerConfig(
        **training,
        model=model,
        weights_root=str(run_dir / "weights"),
        tokenizer=str(tokenizer),
        seed=run.seed,
        steps=run.steps,
        domains={
            d.name: CreditSpec(
                advantage=d.advantage, loss_weight=d.loss_weight, max_length=most[d.name], adapter=d.adapter
            )
            for d in run.domains
        },
        imitation=ImitationSpec(**imitation),
        temperature=1.0 if run.training.data is not None else run.domains[0].temperature,
        threads=max(1, len(trainer.devices) // trainer_ranks(resolved)),
        device=device,
        parallel=ParallelConfig(
            ranks=trainer_ranks(resolved),
            dtype=trainer_dtype(resolved, device),
            activation_checkpointing=shape.activation_checkpointing,
            compile=shape.compile,
            bucket_mb=shape.bucket_mb,
        ),
        deterministic=run.deterministic,
        published_dtype=None if run.weights.dtype == "trained" else run.weights.dtype,
    )
    path = run_dir / "trainer.json"
    path.write_text(config.model_dump_json(indent=2) + "\n")
    return path


def runtime_domains(
    resolved: Resolved,
    tokenizer: HubTokenizer,
    harnesses: HarnessRunner | None = None,
    hosts: EnvironmentHostSupervisor | None = None,
) -> list[Domain]:
    """The runtime's domains. Environments are imported, not created. `harnesses`: runs agent programs, if episodes are
    to be played; `hosts`: hosts of the environments, if they do not live in this process."""
    return [
        Domain(
            name=spec.name,
            environment=hosts.environment(spec.name)
            if hosts and isinstance(spec.environment, str)
            else in_process(environment_factory(spec)),
            quota=resolved.quotas[spec.name],
            group_size=spec.group_size,
            max_turns=spec.max_turns,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids(spec, tokenizer), *(chat.stop_ids if chat else ())))),
            harness=harness_factory(spec, harnesses),
            chat=chat,
            success_at=spec.success_at,
            adapter=spec.adapter,
        )
        for spec, chat in zip(resolved.run.domains, domain_chats(resolved, tokenizer.directory), strict=True)
    ]


def domain_chats(specs: Specs, tokenizer: Path) -> list[EpisodeChat | None]:
    """The chat of each domain; None for domains without one. `tokenizer`: its directory. SpecError names the domain."""
    form, found = None, list[EpisodeChat | None]()
    for spec in specs.run.domains:
        if spec.chat is None:
            found.append(None)
            continue
        try:
            form = form or chat_format(tokenizer)
            tools = () if spec.chat.tools is None else _tool_schemas(spec.chat.tools)
            found.append(EpisodeChat(form, system=spec.chat.system, role=spec.chat.observations, tools=tools))
        except SpecError as error:
            raise SpecError(f"chat of domain '{spec.name}': {error.message}", remedy=error.remedy) from None
    return found


def _tool_schemas(path: str) -> list[dict[str, Any]]:
    schemas = import_attribute(path, "chat.tools")
    if not isinstance(schemas, list | tuple) or not all(_is_tool(schema) for schema in schemas):
        raise SpecError(
            f"{path} is no list of tools",
            remedy='[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}]',
        )
    return list(schemas)


def _is_tool(schema: object) -> bool:
    function = schema.get("function") if isinstance(schema, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def chat_format(directory: Path, *, template: Path | None = None, tools: str | None = None) -> ChatFormat:
    """SpecError for an unreadable directory or template, or if Jinja is not installed."""
    try:
        source = None if template is None else template.read_text()
    except OSError as error:
        raise SpecError(f"cannot read {template}: {error.strerror}") from None
    try:
        return ChatFormat(directory, template=source, tools=tools)
    except ImportError as error:
        raise SpecError(f"chat templates need Jinja: {error}", remedy="pip install 'rollart[proxy]'") from None


async def produce_artefacts(resolved: Specs, run_dir: Path) -> dict[str, list[str]]:
    """Artefact paths by function. A producer runs once per run, in a separate process, since it may import torch."""
    found: dict[str, list[str]] = {}
    for function in resolved.run.functions:
        if function.artefact is None:
            continue
        given = [function.artefact] if isinstance(function.artefact, str) else function.artefact
        if not (len(given) == 1 and ":" in given[0]):
            found[function.name] = [str(Path(resolved.base) / path) for path in given]
            continue
        directory = run_dir / "artefacts" / function.name
        marker = directory / "COMPLETE"
        if not marker.exists():
            directory.mkdir(parents=True, exist_ok=True)
            await _produce(function.name, given[0], directory, resolved.run.seed)
            marker.touch()
        found[function.name] = [str(p) for p in sorted(directory.iterdir()) if p != marker]
    return found


async def warm_start_samples(
    resolved: Resolved,
    tokenizer: HubTokenizer,
    hosts: EnvironmentHostSupervisor | None,
    leases: Leases,
    chats: Mapping[str, ChatPrompts | None],
) -> list[TrainSample]:
    """Worked examples of the warm start's domains as samples, with loss on the answer and none on the prompt. `hosts`:
    hosts that serve the examples as episodes, if environments do not live in this process; `chats`: the domains' chat
    templates."""
    warm = resolved.run.warm_start
    samples = []
    for name in warm.domains if warm is not None else ():
        spec = resolved.run.domain(name)
        seeds = [derive_seed(resolved.run.seed, "warm", name, i) % 2**30 for i in range(warm.examples if warm else 0)]
        if hosts is not None and isinstance(spec.environment, str):
            make = hosts.environment(worked_example_domain(name))
            examples = await _examples_from_hosts(make, seeds, leases, resolved.run.leases.env_step_s)
        else:
            examples = _examples_in_process(spec, seeds)
        for index, texts in enumerate(examples):
            tokens = _worked_tokens(texts, tokenizer, chats[name])
            samples.append(TrainSample.unsampled(f"worked-{name}-{index}", name, *tokens, score=1.0))
    return samples


def given_samples(specs: Specs, tokenizer: Path) -> Sequence[tuple[Sequence[int], bytes]]:
    """Tokens and loss flags of each conversation of `training.data`, whose digest is `training.data_sha256` if that is
    given; none without the key. SpecError names the line and the key of a bad one."""
    training = specs.run.training
    if training.data is None:
        return ()
    digest = data_digest(specs)
    if training.data_sha256 not in (None, digest):
        raise SpecError(
            f"training.data is '{training.data}' with SHA-256 {digest} (rule: {training.data_sha256}, as "
            "training.data_sha256 says)",
            remedy="restore the file, or start a new run",
        )
    try:
        return read_samples(Path(specs.base) / training.data, digest, tokenizer, specs.run.model.context)
    except SpecError as error:
        raise SpecError(f"training.data: {error.message}", remedy=error.remedy) from None
    except ImportError as error:
        raise SpecError(f"chat templates need Jinja: {error}", remedy="pip install 'rollart[proxy]'") from None


def _worked_tokens(texts: Sequence[str], tokenizer: HubTokenizer, chat: ChatPrompts | None) -> list[tuple[int, ...]]:
    """The tokens of an example's observations and answers, in turn."""
    if chat is None:
        return [tokenizer.encode(text) for text in texts]
    tokens = [chat.opening(texts[0])]
    for index, text in enumerate(texts[1:], start=1):
        tokens.append(chat.answer(text) if index % 2 else chat.following(text, tokens[-1]))
    return tokens


@guard
def _examples_in_process(spec: DomainSpec, seeds: Sequence[int]) -> list[Sequence[str]]:
    """Worked examples from an environment in this process."""
    solve = getattr(environment_factory(spec)(), METHOD, None)
    if solve is None:
        raise SpecError(
            f"warm_start.domains: environment '{spec.environment}' gives no worked examples",
            remedy="give it a method worked_example(seed) -> (prompt, answer), or leave the domain out",
        )
    try:
        with UserCodeGuard():
            return [checked_example(solve(seed)) for seed in seeds]
    except Exception as error:
        raise SpecError(
            f"warm_start.domains: environment '{spec.environment}' gave no worked example: {one_line(error)}",
            remedy="mend it, or leave the domain out",
        ) from None


async def _examples_from_hosts(
    make: EnvironmentFactory, seeds: Sequence[int], leases: Leases, limit_s: float
) -> list[Sequence[str]]:
    """Worked examples from hosts. A request is repeated if its host ends."""
    semaphore = asyncio.Semaphore(CONCURRENT_EXAMPLES)

    async def once(seed: int) -> Sequence[str]:
        environment = make()
        try:
            async with leases.hold("launch", "a worked example", limit_s, Expiry.FAIL_RUN):
                texts, done = [(await environment.reset(seed)).text], False
                while not done:
                    step = await environment.step("")
                    texts.append(step.observation.text)
                    done = step.done
                return texts
        finally:
            await environment.close()

    async def one(seed: int) -> Sequence[str]:
        async with semaphore:
            for _ in range(EXAMPLE_TRIES - 1):
                with contextlib.suppress(EnvironmentFault):
                    return await once(seed)
            return await once(seed)

    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(one(seed), name="worked example") for seed in seeds]
    return [task.result() for task in found]


def stop_token_ids(spec: DomainSpec, tokenizer: HubTokenizer) -> tuple[int, ...]:
    """SpecError for a stop text that is not a single token."""
    try:
        return tuple(tokenizer.token_id(text) for text in spec.stop)
    except ValueError as error:
        raise SpecError(f"domain '{spec.name}', stop: {error}") from None


def harness_factory(spec: DomainSpec, harnesses: HarnessRunner | None) -> HarnessFactory | None:
    if isinstance(spec.environment, str):
        return None
    path = spec.environment.harness
    agent = import_attribute(path, f"harness of domain '{spec.name}'")
    if not inspect.iscoroutinefunction(agent):
        raise SpecError(
            f"harness of domain '{spec.name}': {path} is no coroutine function",
            remedy="async def agent(base_url, session, seed, ...) -> float",
        )
    try:
        inspect.signature(agent).bind(base_url="", session="", seed=0, **spec.environment_args)
    except TypeError as error:
        raise SpecError(f"harness of domain '{spec.name}': {path} refuses its arguments: {error}") from None
    return None if harnesses is None else harnesses.factory(agent, spec.environment_args)


@guard
def environment_factory(spec: DomainSpec) -> Callable[[], Any]:
    if not isinstance(spec.environment, str):

        def refuse() -> Any:
            raise SpecError(
                f"domain '{spec.name}' is a harness, which nothing but the policy plays",
                remedy="give it a `profile` for plans and simulations, and leave it out of warm_start",
            )

        return refuse
    make = import_attribute(spec.environment, f"environment of domain '{spec.name}'")
    arguments = dict(spec.environment_args)
    try:
        with UserCodeGuard():
            make(**arguments)
    except ImportError as error:
        raise SpecError(f"environment of domain '{spec.name}': {error}", remedy="pip install 'rollart[envs]'") from None
    except (TypeError, ValueError) as error:
        raise SpecError(f"environment of domain '{spec.name}' refuses its arguments {arguments}: {error}") from None
    except Exception as error:
        raise SpecError(
            f"environment of domain '{spec.name}' cannot be made: {one_line(error)}", remedy=f"mend {spec.environment}"
        ) from None
    return lambda: make(**arguments)


async def _produce(function: str, producer: str, directory: Path, seed: int) -> None:
    module, _, name = producer.partition(":")
    guard = f"from rollart.lifeline import die_with_parent; die_with_parent({os.getpid()})"
    code = f"{guard}; import sys; from {module} import {name}; {name}(sys.argv[1], int(sys.argv[2]))"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        str(directory),
        str(seed),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, stderr = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode != 0:
        lines = stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise PartDied(f"artefact of function '{function}'", f"{producer} failed: {lines[-1][:300]}")
