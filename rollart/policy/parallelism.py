"""Two ways to put rollout GPUs to better use (RollPacker, arXiv 2509.21009): tensor parallelism that follows
preemption, and rollout instances lent to training while a rollout ends.

Both decide only; values in, a decision with its reason out.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollart.policy.lengths import conditional_quantile

__all__ = [
    "LendingRefusal",
    "LendingRefusalReason",
    "LendingPlan",
    "Migration",
    "RolloutInstance",
    "RolloutRequest",
    "TensorParallelRule",
    "TensorParallelState",
    "default_tp",
    "plan_lending",
    "next_tensor_parallelism",
    "peak_kv_tokens",
]

LEND_FROM, LEND_TO, LEND_EVERY = 20, 50, 5
"""Percent of a rollout's requests that are done: lending is looked at from here to there, once in every so many
(RollPacker). Before, too much KV is alive; after, too little of the rollout is left to be worth the move."""

LEND_QUANTILE = 0.9
"""Quantile of the length that a request may yet reach, given how far it is. Summed over requests it is well above what
they will need together, which is the margin: a wrong yes costs preemptions, a wrong no only the gain."""


@dataclass(frozen=True, slots=True)
class TensorParallelRule:
    """Bounds and thresholds. `sizes` are the TP sizes that the model's heads allow, ascending, each twice the one
    before; a TP group stays within the `devices` of one host.

    A halving that had to be taken back doubles the quiet steps that the next one waits for, up to `most_quiet_steps`;
    a doubling for another cause sets them back. So a load that needs a size is left it ever less often.
    """

    sizes: tuple[int, ...]
    devices: int
    rise: float = 1.05
    quiet_steps: int = 4
    most_quiet_steps: int = 64
    noise: int = 1
    """Preemptions per step below which a rise is none."""

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
    """What is remembered between steps. Keep one for each kind of round: the preemptions of short and long rounds of
    tail batching are not comparable."""

    tp: int
    preemptions: int | None = None
    quiet: int = 0
    patience: int | None = None
    """Quiet steps before the next halving; None: the rule's."""
    since_halved: int | None = None


def default_tp(throughput: Mapping[int, float]) -> int:
    """TP size to start with, from a profile of tokens/s on the same devices: the fastest, of equals the smallest."""
    if not throughput:
        raise ValueError("no profile: measure at least one TP size")
    return min(throughput, key=lambda tp: (-throughput[tp], tp))


def next_tensor_parallelism(
    rule: TensorParallelRule, state: TensorParallelState, preemptions: int
) -> tuple[TensorParallelState, str]:
    """After a rollout step with that many preemptions: the next state and, where its `tp` differs, why ('' if not).

    More than `rise` times the step before doubles the TP size (weights take less of each device, so there is more KV
    per sequence); `quiet_steps` steps in a row without any preemption halve it (more engines, less communication).
    Preemptions that stay level change nothing: the size to start with is the profile's affair (`default_tp`).
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
    """One rollout engine: a whole TP group. `bundle` names what training can only take together (the instances on the
    GPUs of one data-parallel replica); '' for an instance by itself. `kv_bytes` is its room for KV cache."""

    id: str
    devices: int
    kv_bytes: float
    bundle: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1 or self.kv_bytes <= 0:
            raise ValueError(f"{self}: at least one device, and room for KV")


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A response that is not finished: where it runs (None: it waits), its tokens so far with the prompt (the KV that
    it holds), those of them that were generated, and the most that it may generate."""

    id: str
    instance: str | None
    domain: str
    context: int
    generated: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Migration:
    """The request goes on elsewhere with the tokens it has; `recompute` of them are prefilled again (its KV)."""

    request: str
    source: str | None
    target: str
    recompute: int


class LendingRefusalReason(enum.Enum):
    """Why no instance is lent now."""

    EARLY = "early"
    LATE = "late"
    CHECKED = "checked"
    """Nothing new since the last look."""
    WHOLE = "whole"
    """No half without splitting a TP group or a bundle."""
    KV = "kv"
    """What is left would not fit on what is left."""


@dataclass(frozen=True, slots=True)
class LendingPlan:
    """The instances that go to training and what moves first. `peak_bytes` is the projected peak KV per instance that
    stays."""

    instances: tuple[str, ...]
    devices: int
    migrations: tuple[Migration, ...]
    peak_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LendingRefusal:
    """`checked` goes into the next call: the looks that were taken so far."""

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
    """Whether half of the rollout instances can train for the rest of this rollout: `done` requests are finished,
    `requests` are not; `lengths` are generated tokens of finished responses per domain, ascending.

    Looked at from 20 % to 50 % done, once in every 5 %. Half of the devices, or the next less that splits no TP group
    and no bundle; of several choices the one with the fewest tokens to prefill again, then by order given. Yes only if
    every instance that stays has room, times `headroom`, for the projected peak KV of what it will hold. A domain of
    which nothing longer finished is taken to go to its limit.
    """
    total = done + len(requests)
    if 100 * done < LEND_FROM * total or total == 0:
        return LendingRefusal(LendingRefusalReason.EARLY, checked, f"{done} of {total} done is less than {LEND_FROM} %")
    if 100 * done > LEND_TO * total:
        return LendingRefusal(LendingRefusalReason.LATE, checked, f"{done} of {total} done is more than {LEND_TO} %")
    look = (100 * done - LEND_FROM * total) // (LEND_EVERY * total) + 1
    if look <= checked:
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
            look,
            f"no half of {len(instances)} instances leaves TP groups and bundles whole",
        )
    staying = [x for x in instances if x.id not in lent]
    placed, migrations = _placed(requests, staying, lengths, quantile)
    peaks = {x.id: peak_kv_tokens(placed[x.id]) * bytes_per_token for x in staying}
    for x in staying:
        if peaks[x.id] > headroom * x.kv_bytes:
            detail = f"{x.id} would need {peaks[x.id] / 1e9:.3g} GB of KV and has {headroom * x.kv_bytes / 1e9:.3g} GB"
            return LendingRefusal(LendingRefusalReason.KV, look, detail)
    devices = sum(x.devices for x in instances if x.id in lent)
    return LendingPlan(tuple(x.id for x in instances if x.id in lent), devices, tuple(migrations), peaks)


def peak_kv_tokens(requests: Iterable[tuple[float, float]]) -> float:
    """The most tokens of KV that (context, tokens yet to come) pairs hold together, when each gets one token per step
    until it is done. O(n log n): the peak is at the end of one of them."""
    peak = contexts = 0.0
    for n, (context, rest) in enumerate(sorted(requests, key=lambda x: -x[1]), 1):
        contexts += context
        peak = max(peak, contexts + n * rest)
    return peak


def _half(instances: Sequence[RolloutInstance], held: Mapping[str, int]) -> frozenset[str]:
    """Subset sum over bundles: the most devices up to half, then the fewest held tokens, then the first given."""
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
    """(context, tokens yet to come) of what each staying instance will hold. What runs there stays; the others go, the
    largest first, to the instance that is least full (of its own room; of equals the first given)."""
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
