"""The computation of `rollart rewards test`: a function run with its cases as a provider would run it, and its cost.

Each case is called alone twice, cold or warm as it happens, for its score, its time, and whether a function that is
declared deterministic returns the same value twice. Then a full batch is called, for the time per item and whether an
item's score depends on the other items of its call. Times and costs are those of warm calls that scored: a failed call,
or a model fault, may have ended before the work.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serverless import wire
from serverless.analysis.imports import undeclared
from serverless.deploy.package import Package
from serverless.errors import SpecInvalid
from serverless.history import differences, refusal
from serverless.meter import billed_seconds
from serverless.pipeline.queues import run_seconds
from serverless.providers.base import Backend, Reply
from serverless.spec import FunctionSpec, Settings
from serverless.types import FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, TokenUsage
from serverless.usage import total
from serverless.workers.local import LocalBackend

_TOLERANCE = 1e-6

MODAL_CORES = 0.125
"""Modal's smallest CPU request, used for a function that requests none."""

IDLE_LEAST_S, IDLE_MOST_S = 2.0, 3600.0
"""Modal's bounds, in seconds, of a container's idle time before it stops."""


class ExpectedOutcome(Settings):
    """The expected outcome of a case. `fault`: "model", "any" (of the platform), or a kind ("crash", "timeout",
    ...)."""

    score: float | None = None
    min: float | None = None
    max: float | None = None
    fault: str = Field(default="", pattern=f"^({'|'.join(['', 'model', 'any', *FaultKind])})$")

    def mismatch(self, outcome: Outcome) -> str:
        """The mismatch of an outcome, '' if none. The score of a model fault is its floor."""
        if isinstance(outcome, InfraFault):
            return "" if self.fault in ("any", str(outcome.kind)) else f"{outcome.kind}: {outcome.detail}"
        if isinstance(outcome, ModelFault) and self.fault != "model":
            return f"model fault: {outcome.reason}"
        if isinstance(outcome, Scored) and self.fault:
            return f"scored {outcome.value:g}, expected a fault ({self.fault})"
        value = outcome.value if isinstance(outcome, Scored) else outcome.floor
        if self.score is not None and not math.isclose(value, self.score, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            return f"{value:g}, expected {self.score:g}"
        if self.min is not None and value < self.min - _TOLERANCE:
            return f"{value:g}, expected at least {self.min:g}"
        if self.max is not None and value > self.max + _TOLERANCE:
            return f"{value:g}, expected at most {self.max:g}"
        return ""


class _CaseLine(BaseModel):
    """One line of cases.jsonl: an item, with `prompt` and `completion` as a short form of `messages`."""

    model_config = ConfigDict(extra="forbid")

    id: str = ""
    messages: list[dict[str, str]] = []
    prompt: str | None = None
    completion: str | None = None
    reference_answer: str | None = None
    metadata: dict[str, Any] = {}
    expected: ExpectedOutcome | None = None

    @model_validator(mode="after")
    def _one_form(self) -> _CaseLine:
        if bool(self.messages) == (self.completion is not None):
            raise ValueError("give either messages, or completion (and prompt)")
        return self

    def item(self, number: int) -> Item:
        messages = list(self.messages)
        if self.completion is not None:
            asked = [{"role": "user", "content": self.prompt}] if self.prompt is not None else []
            messages = [*asked, {"role": "assistant", "content": self.completion}]
        return Item(self.id or str(number), tuple(messages), self.reference_answer, self.metadata)


@dataclass(frozen=True, slots=True)
class RehearsalCase:
    item: Item
    expected: ExpectedOutcome | None = None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case. `seconds` is the duration of the call without its cold start; `problem` is '' for a case
    that passed."""

    case: RehearsalCase
    outcome: Outcome
    seconds: float
    cold_start_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CostPerMillion:
    """US dollars per million items at one provider; None where its prices do not cover the function. `usd_idle` is the
    cost of one container that waits `idle_s` for a call: at least once per container, and again in each pause."""

    provider: str
    usd_single: float | None
    usd_batched: float | None
    batch: int
    note: str = ""
    usd_idle: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The results of a rehearsal. `memory_mb` is the largest resident set of a worker, None where the backend does not
    expose its processes.

    `warnings` are findings other than failed cases: answers that differ between calls, or with their batch.
    """

    function: str
    version: str
    results: tuple[CaseResult, ...]
    single_s: float | None
    """Median of a warm call that scored its one item, None if no call did."""
    batch: int
    batched_item_s: float | None
    """Seconds per item of a full batch, None if not all of its items were scored."""
    cold_start_s: float
    memory_mb: float | None
    memory_limit_mb: int
    costs: tuple[CostPerMillion, ...] = ()
    warnings: tuple[str, ...] = ()
    tokens: tuple[TokenUsage, ...] = ()
    """Tokens that all calls consumed, which scored `token_items` items: an entry per endpoint and model. Empty if no
    item was scored."""
    token_items: int = 0

    @property
    def passed(self) -> bool:
        return not any(r.problem for r in self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data, with `schema_version`."""
        cases = [
            {
                "id": r.case.item.id,
                "passed": not r.problem,
                "expected": r.case.expected.model_dump(exclude_unset=True) if r.case.expected else None,
                "problem": r.problem,
                "outcome": type(r.outcome).__name__,
                **asdict(r.outcome),
                "seconds": r.seconds,
                "cold_start_s": r.cold_start_s,
            }
            for r in self.results
        ]
        rest = {k: v for k, v in asdict(self).items() if k not in ("results", "costs")}
        costs_json = [asdict(c) for c in self.costs]
        return {"schema_version": 1, **rest, "passed": self.passed, "cases": cases, "costs": costs_json}


def read_cases(path: pathlib.Path) -> list[RehearsalCase]:
    """The cases of a JSONL file. Raises `SpecInvalid` with `file:line` for an invalid line, and for an empty file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecInvalid(f"cases {path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SpecInvalid(f"cases {path}: {error.strerror}", remedy="give a JSONL file of items") from None
    cases: list[RehearsalCase] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _CaseLine.model_validate_json(text)
        except ValidationError as error:
            raise SpecInvalid(f"{path.name}:{number}: {_first_error(error)}") from None
        cases.append(RehearsalCase(line.item(number), line.expected))
    if not cases:
        raise SpecInvalid(f"cases {path}: no item in it", remedy="write one JSON object a line")
    return cases


def _first_error(error: ValidationError) -> str:
    """The first error of a line."""
    first = error.errors()[0]
    where, text = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        model = ExpectedOutcome if first["loc"][0] == "expected" else _CaseLine
        return f"unknown key '{where}' (rule: one of {', '.join(model.model_fields)})"
    if first["type"] == "string_pattern_mismatch":
        text = f"{first['input']!r} (rule: one of {', '.join(['model', 'any', *FaultKind])})"
    return f"{where}: {text}" if where else text


async def rehearse(
    package: Package, cases: Sequence[RehearsalCase], *, backend: Backend, prices: Mapping[str, Mapping[str, float]]
) -> Rehearsal:
    """Run the cases, of which there must be at least one, on an open `backend`.

    `prices` maps a provider to US dollars by unit (see `cost`). Faults are results, not errors. Raises `BackendFailed`
    and similar errors if the function cannot run at all.
    """
    if not cases:
        raise SpecInvalid("no cases to rehearse", remedy="give at least one item")
    await backend.deploy(package)
    caller = _Caller(backend, package)
    first = [await caller.single(case) for case in cases]
    again = [await caller.single(case) for case in reversed(cases)][::-1]  # one worker serves calls in turn
    batch, batched, full = await caller.full_batch(again)
    spec, results = package.spec, (*first, *again)
    scored = [r for r in results if isinstance(r.outcome, Scored)]
    warm = [r.seconds for r in scored if not r.cold_start_s] or [r.seconds for r in scored]
    warnings = [*package.warnings, *_undeclared(package)]
    if not scored:
        warnings.append("no case was scored: there are no times and no costs of an item")
    elif batched is None:
        warnings.append(f"a call of {batch} items did not score all of them: there is no time and no cost of a batch")
    if spec.deterministic:
        items, answers, later = [r.case.item for r in first], [r.outcome for r in first], [r.outcome for r in again]
        changed = differences(items, answers, later, calls=len(results))
        mixed = {r.case.item.id: None for r, outcome in full if r.outcome != outcome}
        if changed:
            warnings.append(refusal(spec.name, changed).message)
        elif mixed:
            warnings.append(f"the answer depends on what else is in the call: {', '.join(mixed)}")
    # For a batch of one, use the mean over every case, not the first one alone.
    mean_s = statistics.mean(warm) if warm else None
    return Rehearsal(
        function=spec.name,
        version=package.version,
        results=tuple(first),
        single_s=statistics.median(warm) if warm else None,
        batch=batch,
        batched_item_s=batched,
        cold_start_s=max(r.cold_start_s for r in results),
        memory_mb=caller.peak_mb,
        memory_limit_mb=spec.memory_mb,
        costs=tuple(
            _costs(spec, provider, units, mean_s, mean_s if batch == 1 else batched, batch)
            for provider, units in prices.items()
        ),
        warnings=tuple(warnings),
        tokens=tuple(caller.tokens) if caller.items else (),
        token_items=caller.items,
    )


def cost(spec: FunctionSpec, prices: Mapping[str, float], call_s: float, items: int) -> float | None:
    """US dollars per million items in calls of `call_s` seconds with `items` each.

    Units: "GB-second" with "million-requests" (Lambda: memory by 1,024 MB, time rounded up to 1 ms), or "core-second"
    with "GiB-second" (Modal: at least 0.125 cores), and "gpu-second:TYPE" for a GPU. None without these.
    """
    memory = spec.memory_mb / 1024.0
    if "GB-second" in prices:
        if spec.gpu:
            return None
        call = billed_seconds(call_s) * memory * prices["GB-second"] + prices.get("million-requests", 0.0) / 1e6
    else:
        second = _container_usd(spec, prices)
        if second is None:
            return None
        call = call_s * second
    return call / items * 1e6


def _container_usd(spec: FunctionSpec, prices: Mapping[str, float]) -> float | None:
    """US dollars per second of a container, busy or idle; None without such prices."""
    kind, count = spec.gpus
    gpu = prices.get(f"gpu-second:{kind}") if count else 0.0
    if "core-second" not in prices or gpu is None:
        return None
    second = max(spec.cpu, MODAL_CORES) * prices["core-second"]
    second += spec.memory_mb / 1024.0 * prices.get("GiB-second", 0.0)
    return second + gpu * count


def _costs(
    spec: FunctionSpec,
    provider: str,
    units: Mapping[str, float],
    single_s: float | None,
    batched_item_s: float | None,
    batch: int,
) -> CostPerMillion:
    """The costs at a provider, with items sent one by one and in full batches."""
    if single_s is None:
        return CostPerMillion(provider, None, None, batch, "no case was scored")
    single = cost(spec, units, single_s, 1)
    batched = None if batched_item_s is None else cost(spec, units, batched_item_s * batch, batch)
    waits = None if "GB-second" in units else _container_usd(spec, units)
    if waits is None:
        note = "" if single is not None else "no price per second"
        if single is None and spec.gpu:
            note = "no GPUs" if "GB-second" in units else f"no price for its GPU {spec.gpu}"
        return CostPerMillion(provider, single, batched, batch, note)
    idle_s = min(IDLE_MOST_S, max(IDLE_LEAST_S, spec.keep_alive_s))
    usd_idle = waits * idle_s
    note = f"and ${usd_idle:.2g} for each {idle_s:g} s that a container waits (keep_alive_s)"
    return CostPerMillion(provider, single, batched, batch, note, usd_idle, idle_s)


def _undeclared(package: Package) -> list[str]:
    """Imports that work on this machine only."""
    found = undeclared(package.files, package.spec.requirements)
    return [f'{one}: other providers may not have it (requirements=["{one.requirement}"])' for one in found]


_ANY_SCORE = ExpectedOutcome()


class _Caller:
    """Calls a deployed function. `peak_mb`: the peak memory of its workers, None if they are not visible. `items`: the
    scored ones."""

    def __init__(self, backend: Backend, package: Package) -> None:
        self._backend = backend
        self._spec = package.spec
        self.peak_mb: float | None = None
        self.tokens: list[TokenUsage] = []
        self.items = 0

    async def single(self, case: RehearsalCase) -> CaseResult:
        """Call a case alone."""
        reply, outcomes = await self._call([wire.encode(case.item)])
        outcome, bill = outcomes[0], reply.invocation
        problem = (case.expected or _ANY_SCORE).mismatch(outcome)
        if case.expected is None and isinstance(outcome, ModelFault):
            problem = ""
        return CaseResult(case, outcome, _warm_seconds(bill), bill.cold_start_s if bill else 0.0, problem)

    async def full_batch(
        self, alone: Sequence[CaseResult]
    ) -> tuple[int, float | None, list[tuple[CaseResult, Outcome]]]:
        """One call with a full batch of the cases in rotation that were scored alone.

        Returns the number of items, the seconds per item (None if not all are scored), and the outcome of each case
        beside its single result.
        """
        limits = self._spec.batch
        good = [r for r in alone if isinstance(r.outcome, Scored)]
        if not good:
            return limits.max_items, None, []
        chosen: list[CaseResult] = []
        total = 0
        for result in itertools.islice(itertools.cycle(good), limits.max_items):
            total += wire.size(wire.encode(result.case.item))
            if chosen and total > limits.max_bytes:
                break
            chosen.append(result)
        reply, outcomes = await self._call([{**wire.encode(r.case.item), "id": f"{n}"} for n, r in enumerate(chosen)])
        if reply.fault is not None or reply.invocation is None:
            return len(chosen), None, []
        every = all(isinstance(outcome, Scored) for outcome in outcomes)
        item_s = _warm_seconds(reply.invocation) / len(chosen) if every else None
        return len(chosen), item_s, list(zip(chosen, outcomes, strict=True))

    async def _call(self, event: list[wire.WireItem]) -> tuple[Reply, list[Outcome]]:
        spec = self._spec
        reply = await self._backend.invoke(spec.name, event, deadline_s=spec.timeout_s + spec.init_timeout_s + 1.0)
        seen = _peak_mb(self._backend)
        self.peak_mb = seen if self.peak_mb is None else max(self.peak_mb, seen or 0.0)
        self.tokens = total([*self.tokens, *(used for used, _ in wire.usage(reply.body))])
        fault = reply.fault
        if fault is None:
            outcomes = wire.outcomes(reply.body, event, deterministic=spec.deterministic)
            self.items += sum(isinstance(outcome, Scored) for outcome in outcomes)
            return reply, outcomes
        if fault.kind is FaultKind.TIMEOUT and spec.timeout_floor is not None:
            return reply, [ModelFault(spec.timeout_floor, fault.detail)] * len(event)
        return reply, [fault] * len(event)


def _warm_seconds(bill: Invocation | None) -> float:
    """The duration of a call without its cold start."""
    return run_seconds(bill) if bill is not None else 0.0


def _peak_mb(backend: Backend) -> float | None:
    """The largest resident set of the local backend's workers so far, MiB, including memory shared with the zygote."""
    if not isinstance(backend, LocalBackend):
        return None
    peaks: list[float] = []
    for zygote in backend.zygote_pids:
        with contextlib.suppress(OSError, ValueError):  # a worker that ends meanwhile
            for pid in pathlib.Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split():
                status = pathlib.Path(f"/proc/{pid}/status").read_text()
                peaks += [int(line.split()[1]) / 1024.0 for line in status.splitlines() if line.startswith("VmHWM:")]
    return max(peaks, default=None)
