"""Two ways to use rollout GPUs better (RollPacker, arXiv 2509.21009): tensor parallelism adapted to preemptions, and
rollout instances lent to training during a rollout's tail.

Both are pure decisions: values in, a decision with its reason out.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart.policy.lengths import conditional_quantile

LEND_FROM, LEND_TO, LEND_EVERY = 20, 50, 5
"""Percent of a rollout's requests that are done: lending is considered from `LEND_FROM` to `LEND_TO`, once per
`LEND_EVERY` (RollPacker). Earlier, too much KV is in use; later, too little of the rollout is left to pay for the
move."""

LEND_QUANTILE = 0.9
"""Quantile of a request's final length, given its length so far. Summed over requests it is well above the total that
they will need, which is the margin: a wrong decision to lend costs preemptions, a wrong refusal only the gain."""


@dataclass(frozen=True, slots=True)
class TensorParallelRule:
    """Bounds and thresholds. `sizes` are the TP sizes that the model's heads allow, ascending, each twice the previous
    one; a TP group stays within the `devices` of one host.

    A halving that had to be reverted doubles the quiet steps before the next halving, up to `most_quiet_steps`; a
    doubling for another cause resets them. So a load that needs a size is disturbed ever less often.
    """

    sizes: tuple[int, ...]
    devices: int
    rise: float = 1.05
    quiet_steps: int = 4
    most_quiet_steps: int = 64
    noise: int = 1
    """Preemptions per step below which an increase is ignored."""

    def __post_init__(self) -> None:
        doubled = all(b == 2 * a for a, b in itertools.pairwise(self.sizes))
        if not self.sizes or self.sizes[0] < 1 or not doubled:
            raise ValueError(f"sizes {self.sizes}: at least one, each twice the one before")
        if any(self.devices % size for size in self.sizes):
            raise ValueError(f"sizes {self.sizes} on {self.devices} devices: a TP group does not leave its host")
        if self.rise < 1 or not 1 <= self.quiet_steps <= self.most_quiet_steps or self.noise < 1:
            raise ValueError(f"{self}: rise >= 1, 1 <= quiet_steps <= most_quiet_steps, noise >= 1")


@dataclass(frozen=True, slots=True)
class TensorParallelState:
    """State between steps. Keep one for each kind of round: the preemptions of short and long rounds of tail batching
    are not comparable."""

    tp: int
    preemptions: int | None = None
    quiet: int = 0
    patience: int | None = None
    """Quiet steps before the next halving; None: the rule's."""
    since_halved: int | None = None


def default_tp(throughput: Mapping[int, float]) -> int:
    """Initial TP size, from a profile of tokens/s on the same devices: the fastest; ties go to the smallest."""
    if not throughput:
        raise ValueError("no profile: measure at least one TP size")
    return min(throughput, key=lambda tp: (-throughput[tp], tp))


def next_tensor_parallelism(
    rule: TensorParallelRule, state: TensorParallelState, preemptions: int
) -> tuple[TensorParallelState, str]:
    """The next state after a rollout step with `preemptions` preemptions and, where its `tp` differs, the reason ('' if
    not).

    An increase to more than `rise` times the previous step's doubles the TP size (weights take less of each device, so
    there is more KV per sequence); `quiet_steps` consecutive steps without preemption halve it (more engines, less
    communication). A constant number of preemptions changes nothing: the profile determines the initial size
    (`default_tp`).
    """
    if state.tp not in rule.sizes:
        raise ValueError(f"tp {state.tp} is none of {rule.sizes}")
    if preemptions < 0:
        raise ValueError(f"{preemptions} preemptions: not negative")
    patience = state.patience or rule.quiet_steps
    quiet = 0 if preemptions else state.quiet + 1
    since = None if state.since_halved is None else state.since_halved + 1
    seen = replace(state, preemptions=preemptions, quiet=quiet, patience=patience, since_halved=since)
    before = state.preemptions
    if before is not None and preemptions >= rule.noise and preemptions > rule.rise * before:
        if state.tp == rule.sizes[-1]:
            return seen, ""
        regret = since is not None and since <= patience
        patience = min(2 * patience, rule.most_quiet_steps) if regret else rule.quiet_steps
        grown = replace(seen, tp=2 * state.tp, patience=patience, since_halved=None)
        return grown, f"preemptions {before} -> {preemptions}: tp {state.tp} -> {2 * state.tp}"
    if quiet >= patience and state.tp > rule.sizes[0]:
        halved = replace(seen, tp=state.tp // 2, quiet=0, since_halved=0)
        return halved, f"no preemption in {quiet} steps: tp {state.tp} -> {state.tp // 2}"
    return seen, ""


@dataclass(frozen=True, slots=True)
class RolloutInstance:
    """One rollout engine: a whole TP group. `bundle` names instances that training can only take together (those on the
    GPUs of one data-parallel replica); '' for an independent instance. `kv_bytes` is its room for KV cache."""

    id: str
    devices: int
    kv_bytes: float
    bundle: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1 or self.kv_bytes <= 0:
            raise ValueError(f"{self}: at least one device, and room for KV")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """An unfinished response: its instance (None: it waits), its context in tokens with the prompt (the KV that it
    holds), the tokens generated so far, and the most that it may generate."""

    id: str
    instance: str | None
    domain: str
    context: int
    generated: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Migration:
    """The request continues on `target` with its tokens; `recompute` of them are prefilled again (its KV)."""

    request: str
    source: str | None
    target: str
    recompute: int


class LendingRefusalReason(enum.Enum):
    """Why no instance is lent now."""

    EARLY = "early"
    LATE = "late"
    CHECKED = "checked"
    """This interval of progress was checked already."""
    WHOLE = "whole"
    """No half exists without splitting a TP group or a bundle."""
    KV = "kv"
    """The remaining requests would not fit on the remaining instances."""


@dataclass(frozen=True, slots=True)
class LendingPlan:
    """The instances that go to training, and the migrations that precede it. `peak_bytes` is the projected peak KV of
    each remaining instance."""

    instances: tuple[str, ...]
    devices: int
    migrations: tuple[Migration, ...]
    peak_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LendingRefusal:
    """`checked`, the number of checks so far, is passed to the next call."""

    reason: LendingRefusalReason
    checked: int
    detail: str


def plan_lending(
    done: int,
    instances: Sequence[RolloutInstance],
    requests: Sequence[RolloutRequest],
    lengths: Mapping[str, Sequence[float]],
    bytes_per_token: float,
    *,
    checked: int = 0,
    quantile: float = LEND_QUANTILE,
    headroom: float = 1.0,
) -> LendingPlan | LendingRefusal:
    """Whether half of the rollout instances can train for the rest of this rollout. `done` counts finished requests,
    `requests` are unfinished; `lengths` are generated tokens of finished responses per domain, ascending.

    Considered from 20 % to 50 % done, once per 5 %. The loan is half of the devices, or the next smaller set that
    splits no TP group and no bundle; among several sets, the one with the fewest tokens to prefill again, then the
    first in the given order. Instances are lent only if every remaining instance has room, times `headroom`, for the
    projected peak KV of its requests. A request of a domain without longer finished responses is assumed to reach its
    limit.
    """
    total = done + len(requests)
    if 100 * done < LEND_FROM * total or total == 0:
        return LendingRefusal(LendingRefusalReason.EARLY, checked, f"{done} of {total} done is less than {LEND_FROM} %")
    if 100 * done > LEND_TO * total:
        return LendingRefusal(LendingRefusalReason.LATE, checked, f"{done} of {total} done is more than {LEND_TO} %")
    interval = (100 * done - LEND_FROM * total) // (LEND_EVERY * total) + 1
    if interval <= checked:
        return LendingRefusal(
            LendingRefusalReason.CHECKED, checked, f"looked at within this {LEND_EVERY} % of progress"
        )
    held: dict[str, int] = defaultdict(int)
    for request in requests:
        if request.instance is not None:
            held[request.instance] += request.context
    lent = _half(instances, held)
    if not lent:
        return LendingRefusal(
            LendingRefusalReason.WHOLE,
            interval,
            f"no half of {len(instances)} instances leaves TP groups and bundles whole",
        )
    staying = [x for x in instances if x.id not in lent]
    placed, migrations = _placed(requests, staying, lengths, quantile)
    peaks = {x.id: peak_kv_tokens(placed[x.id]) * bytes_per_token for x in staying}
    for x in staying:
        if peaks[x.id] > headroom * x.kv_bytes:
            detail = f"{x.id} would need {peaks[x.id] / 1e9:.3g} GB of KV and has {headroom * x.kv_bytes / 1e9:.3g} GB"
            return LendingRefusal(LendingRefusalReason.KV, interval, detail)
    devices = sum(x.devices for x in instances if x.id in lent)
    return LendingPlan(tuple(x.id for x in instances if x.id in lent), devices, tuple(migrations), peaks)


def peak_kv_tokens(requests: Iterable[tuple[float, float]]) -> float:
    """The most tokens of KV that (context, remaining tokens) pairs hold together, when each gets one token per step
    until it is done. O(n log n): the peak is at the end of one of them."""
    peak = contexts = 0.0
    for n, (context, rest) in enumerate(sorted(requests, key=lambda x: -x[1]), 1):
        contexts += context
        peak = max(peak, contexts + n * rest)
    return peak


def _half(instances: Sequence[RolloutInstance], held: Mapping[str, int]) -> frozenset[str]:
    """Subset sum over bundles: the most devices up to half, then the fewest held tokens, then the given order."""
    bundles: dict[tuple[bool, str], list[RolloutInstance]] = defaultdict(list)
    for x in instances:
        bundles[(True, x.bundle) if x.bundle else (False, x.id)].append(x)
    room = sum(x.devices for x in instances) // 2
    cost: dict[int, int] = {0: 0}
    choices: list[dict[int, int]] = []
    members = list(bundles.values())
    for bundle in members:
        size, tokens = sum(x.devices for x in bundle), sum(held.get(x.id, 0) for x in bundle)
        chosen: dict[int, int] = {}
        for reached, so_far in sorted(cost.items(), reverse=True):
            to = reached + size
            if to <= room and (to not in cost or so_far + tokens < cost[to]):
                cost[to] = so_far + tokens
                chosen[to] = reached
        choices.append(chosen)
    at = max(cost)
    lent: set[str] = set()
    for bundle, chosen in zip(reversed(members), reversed(choices), strict=True):
        if at in chosen:
            lent.update(x.id for x in bundle)
            at = chosen[at]
    return frozenset(lent)


def _placed(
    requests: Sequence[RolloutRequest],
    staying: Sequence[RolloutInstance],
    lengths: Mapping[str, Sequence[float]],
    quantile: float,
) -> tuple[dict[str, list[tuple[float, float]]], list[Migration]]:
    """(context, remaining tokens) of the requests of each remaining instance. Requests that run there stay; the others
    are placed, the largest first, on the least full instance (relative to its own room; ties go to the given order)."""
    placed: dict[str, list[tuple[float, float]]] = {x.id: [] for x in staying}
    full = dict.fromkeys(placed, 0.0)
    moving = []
    for request in requests:
        load = float(request.context), _rest(request, lengths, quantile)
        if request.instance in placed:
            placed[request.instance].append(load)
            full[request.instance] += sum(load)
        else:
            moving.append((request, load))
    free = [(full[x.id] / x.kv_bytes, n) for n, x in enumerate(staying)]
    heapq.heapify(free)
    migrations = []
    for request, load in sorted(moving, key=lambda x: -sum(x[1])):
        share, n = free[0]
        target = staying[n]
        heapq.heapreplace(free, (share + sum(load) / target.kv_bytes, n))
        placed[target.id].append(load)
        migrations.append(Migration(request.id, request.instance, target.id, request.context))
    return placed, migrations


def _rest(request: RolloutRequest, lengths: Mapping[str, Sequence[float]], quantile: float) -> float:
    limit = float(max(request.most_tokens - request.generated, 0))
    final = conditional_quantile(lengths.get(request.domain, ()), request.generated, quantile)
    return limit if final is None else min(final - request.generated, limit)
