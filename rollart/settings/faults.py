"""The fault plan of a simulation: outages of parts, on a schedule or at a rate, and failures of functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from rollart.errors import did_you_mean
from rollart.settings.base import SpecEntry
from rollart.settings.rules import RuleViolation, Violations, located

Patterns = Annotated[list[str], Field(min_length=1)]

Share = Annotated[float, Field(ge=0, le=1)]

LINK = "link-"
"""Prefix of the names of links."""


class OutageSpec(SpecEntry):
    """An outage of parts at a given time."""

    parts: Patterns
    """Names or patterns with `*`: `engine-0`, `trainer-0` and so on as in the plan, `machine-POOL-N` (all on a host of
    a pool), `environment-N` (hosts of the cluster's `environments`; without them `host-N`), `reward-N` (hosts of
    function workers, where there are some), `link-weights`, `link-weights-ENGINE`, `link-kv-A-B`."""
    at_s: float = Field(ge=0)
    """Virtual seconds from the start."""
    seconds: float | None = Field(default=None, gt=0)
    """How long; left out, for good."""
    warning_s: float = Field(default=0.0, ge=0)
    """Seconds of notice that a `machine-POOL-N` gives, where `runtime.elastic` is set."""
    left: float = Field(default=0.0, ge=0, lt=1)
    """Share of its bandwidth that a link keeps."""


class RateSpec(SpecEntry):
    """Parts that die at random, independently of each other; times are exponential."""

    parts: Patterns
    """Names or patterns, as in `outages`."""
    every_s: float = Field(gt=0)
    """Mean seconds from a return to the next death, of each part."""
    seconds: float = Field(gt=0)
    """Mean seconds of an outage."""
    left: float = Field(default=0.0, ge=0, lt=1)
    """Share of its bandwidth that a link keeps."""


class ResetTroubleSpec(SpecEntry):
    """Resets of environments that fail or stall, alone and in bursts that hit many hosts at a time."""

    fail: Share = 0.0
    """Probability that a reset raises when its time is over."""
    stall: Share = 0.0
    """Probability that a reset stalls."""
    stall_s: float = Field(default=400.0, ge=0)
    """Seconds of a stall."""
    burst_every_s: float | None = Field(default=None, gt=0)
    """Mean seconds between bursts; none if left out."""
    burst_s: float = Field(default=120.0, gt=0)
    """Seconds of a burst."""
    burst_hosts: Share = 0.25
    """Share of hosts that a burst hits."""
    burst_fail: Share = 0.0
    """`fail` in a burst."""
    burst_stall: Share = 1.0
    """`stall` in a burst."""


class FunctionTroubleSpec(SpecEntry):
    """Functions whose workers start slowly, are few, or fail. Probabilities are per call and add up to at most 1."""

    functions: Patterns = Field(default=["*"])
    """Names or patterns of functions; `reward-DOMAIN` where a domain has only a profile of its reward."""
    cold_start_s: float | None = Field(default=None, ge=0)
    """Seconds of a cold start."""
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    """Most workers at once."""
    spread: float = Field(default=0.0, ge=0, le=3)
    """Sigma of the logarithm of starts and calls."""
    failed_start: Share = 0.0
    """Probability that a start fails."""
    throttled: Share = 0.0
    """Probability that the provider throttles a call."""
    crash: Share = 0.0
    """Probability that a worker dies halfway."""
    out_of_memory: Share = 0.0
    """Probability that a worker is killed for its memory."""
    timeout: Share = 0.0
    """Probability that a call is never answered."""
    unavailable: Share = 0.0
    """Probability that the provider has no answer."""


class FaultPlanSpec(SpecEntry):
    """The faults of a simulation (`rollart simulate --faults FILE`)."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws, combined with the simulation's seed."""
    hosts: int = Field(default=1, ge=1, le=100_000)
    """Hosts of environments, `host-0` and so on, where the cluster has none of its own (`environments.workers`)."""
    outages: list[OutageSpec] = Field(default_factory=list)
    """Scheduled outages."""
    rates: list[RateSpec] = Field(default_factory=list)
    """Random outages."""
    resets: ResetTroubleSpec | None = None
    """Faults of resets."""
    functions: list[FunctionTroubleSpec] = Field(default_factory=list)
    """Faults of functions; of several entries that match one, the first applies."""


def fault_problems(
    plan: FaultPlanSpec, parts: Iterable[str] | None = None, functions: Sequence[str] = ()
) -> list[RuleViolation]:
    """The problems of a plan beyond its types. `parts` and `functions` are the names in the run; None where no run is
    known."""
    known = None if parts is None else list(parts)
    if known is not None and not matching_names("environment-*", known):
        known += [f"host-{n}" for n in range(plan.hosts)]
    return located(
        _parts("outages", plan.outages, known),
        _parts("rates", plan.rates, known),
        _notices(plan),
        _functions(plan, None if parts is None else functions),
    )


def _parts(key: str, entries: Sequence[OutageSpec | RateSpec], known: Sequence[str] | None) -> Violations:
    for i, entry in enumerate(entries):
        for j, pattern in enumerate(entry.parts):
            if known is not None and not matching_names(pattern, known):
                rule = f"a part of this run{did_you_mean(pattern, known) or f': {_name_ranges(known)}'}"
                yield RuleViolation((key, i, "parts", j), f"{key}.{i}.parts names '{pattern}' (rule: {rule})")
            elif entry.left and not pattern.startswith(LINK):
                yield f"{key}.{i}.left is {entry.left:g} for '{pattern}' (rule: links alone)"


def _notices(plan: FaultPlanSpec) -> Violations:
    for i, outage in enumerate(plan.outages):
        for pattern in outage.parts if outage.warning_s else ():
            if not pattern.startswith("machine-"):
                yield f"outages.{i}.warning_s is {outage.warning_s:g} for '{pattern}' (rule: machines alone)"


def _functions(plan: FaultPlanSpec, known: Sequence[str] | None) -> Violations:
    for i, trouble in enumerate(plan.functions):
        total = trouble.throttled + trouble.crash + trouble.out_of_memory + trouble.timeout + trouble.unavailable
        if total > 1:
            yield f"functions.{i} fails {total:g} of its calls (rule: at most 1)"
        for j, pattern in enumerate(trouble.functions):
            if known is not None and not matching_names(pattern, known):
                rule = f"a function of this run{did_you_mean(pattern, known) or ''}"
                yield RuleViolation(("functions", i, "functions", j), f"functions.{i} names '{pattern}' (rule: {rule})")


def matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, in their order."""
    return [name for name in names if fnmatchcase(name, pattern)]


def _name_ranges(names: Iterable[str]) -> str:
    """`engine-0…engine-63, trainer-0`: the first and last of names that differ in their number."""
    ends: dict[str, tuple[str, str]] = {}
    for name in names:
        stem = name.rstrip("0123456789")
        ends[stem] = (ends.get(stem, (name, name))[0], name)
    return ", ".join(first if first == last else f"{first}…{last}" for first, last in ends.values())
