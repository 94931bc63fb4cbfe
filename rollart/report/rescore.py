"""The comparison of a reward function with the outcomes that a run recorded. Pure: rescored items in, tables out.

A score is a `Scored.value` or the floor of a `ModelFault`; an item with an `InfraFault` on either side is compared with
nothing. Of repeated answers the first is the new score, and all of them show the function's own variance.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rollart.ledger.kept import KeptScore, KeptTrajectory
from rollart.model import InfraFault, ModelFault, Outcome, Scored
from rollart.report.simulation import interval
from rollart.report.tables import (
    Report,
    Row,
    Table,
    as_count,
    as_number,
    as_seconds,
    as_share,
    as_text,
    as_usd,
    ratio,
    table,
)
from rollart.settings.prices import PriceList
from serverless.meter import TokenBill
from serverless.types import Invocation

ALL = "all"

SHOWN = 10
"""Items with the largest differences that are shown to people; other formats have every item."""

EQUAL = 1e-9
"""Scores that differ by less are equal: sums of weighted scores have rounding errors."""

DECILES = 10


@dataclass(frozen=True, slots=True)
class RescoredItem:
    """A kept item, the recorded outcome of one function, and the answers of the new one."""

    kept: KeptTrajectory
    old: KeptScore
    answers: tuple[Outcome, ...]

    @property
    def before(self) -> float | None:
        return score_of(self.old.outcome)

    @property
    def after(self) -> float | None:
        return score_of(self.answers[0])

    @property
    def scores(self) -> list[float]:
        """The scores of all answers that are no fault of the platform."""
        return [score for score in map(score_of, self.answers) if score is not None]


@dataclass(frozen=True, slots=True)
class Rescoring:
    """A finished rescoring. `available`: kept items that the old function scored; `calls`, `tokens`: the bills;
    `seconds`: the duration; `tolerance`: the largest difference of scores that agree; `threshold`: the least score that
    passes, None for thresholds derived from the scores."""

    run: str
    old: str
    new: str
    version: str
    provider: str
    items: tuple[RescoredItem, ...]
    available: int
    calls: tuple[Invocation, ...]
    tokens: tuple[TokenBill, ...]
    seconds: float
    prices: PriceList
    tolerance: float
    threshold: float | None = None
    gpu: str = ""
    """The new function's GPU."""


@dataclass(frozen=True, slots=True)
class ScorePair:
    """An item with a score on both sides."""

    item: RescoredItem
    before: float
    after: float

    @property
    def group(self) -> str:
        return self.item.kept.group

    @property
    def totals(self) -> tuple[float, float] | None:
        """The trajectory's reward before and after; None if another function failed on it."""
        value, weight = self.item.kept.value, self.item.old.weight
        return None if value is None else (value, value + weight * (self.after - self.before))


def score_of(outcome: Outcome) -> float | None:
    """The score of an outcome as a trainer gets it; None for a fault of the platform, which is no score."""
    match outcome:
        case Scored():
            return outcome.value
        case ModelFault():
            return outcome.floor
        case InfraFault():
            return None


def rescore_report(found: Rescoring) -> Report:
    by_domain = pairs_by_domain(found.items)
    tables = [
        _agreement(by_domain, found.tolerance),
        _drift(by_domain),
        _thresholds(by_domain[ALL], found.threshold),
        _advantages(by_domain),
        _variance(found.items),
        _faults(found.items),
        _cost(found),
        _differences(by_domain[ALL]),
        _items(found.items),
    ]
    versions = sorted({one.old.version[:12] or "of the run's process" for one in found.items})
    notes = [
        f"{found.old} (version {', '.join(versions)}) as recorded against {found.new} (version {found.version[:12]})",
        f"{len(found.items):,} of {found.available:,} kept items that {found.old} scored",
    ]
    return Report("rescore", found.run, tuple(tables), tuple(notes))


def pairs_by_domain(items: Sequence[RescoredItem]) -> dict[str, list[ScorePair]]:
    """Items with both scores, of all domains and of each if there are several."""
    pairs = [ScorePair(one, one.before, one.after) for one in items if one.before is not None and one.after is not None]
    domains = sorted({one.kept.domain for one in items})
    found = {ALL: pairs}
    if len(domains) > 1:
        found |= {domain: [pair for pair in pairs if pair.item.kept.domain == domain] for domain in domains}
    return found


def _agreement(by_domain: dict[str, list[ScorePair]], tolerance: float) -> Table:
    return Table.of("agreement", f"Agreement of scores (within {tolerance:g})", _agreement_rows(by_domain, tolerance))


def _agreement_rows(by_domain: dict[str, list[ScorePair]], tolerance: float) -> Iterator[Row]:
    for domain, pairs in by_domain.items():
        n, before, after = len(pairs), [p.before for p in pairs], [p.after for p in pairs]
        near = sum(abs(p.after - p.before) <= tolerance + EQUAL for p in pairs)
        yield {
            "domain": domain,
            "compared": as_count(n),
            "equal": as_share(ratio(sum(abs(p.after - p.before) <= EQUAL for p in pairs), n)),
            "within": as_share(ratio(near, n)),
            "correlation": as_number(correlation(before, after)),
            "rank_correlation": as_number(correlation(ranks(before), ranks(after))),
        }


@table("drift", "Drift of scores: means over prompts, and half of the difference's 95 % interval")
def _drift(by_domain: dict[str, list[ScorePair]]) -> Iterator[Row]:
    for domain, pairs in by_domain.items():
        groups: dict[str, list[ScorePair]] = defaultdict(list)
        for pair in pairs:
            groups[pair.group].append(pair)
        mean: float | None = None
        half: float | None = None
        if groups:  # the items of a prompt are not independent
            mean, half = interval([fmean(p.after - p.before for p in members) for members in groups.values()])
        yield {
            "domain": domain,
            "prompts": as_count(len(groups)),
            "old": as_number(_mean([fmean(p.before for p in members) for members in groups.values()])),
            "new": as_number(_mean([fmean(p.after for p in members) for members in groups.values()])),
            "difference": as_number(mean),
            "interval": as_number(half),
        }


@table(
    "thresholds", "Items that pass, where the recorded scores have two values or --threshold is given", optional=True
)
def _thresholds(pairs: Sequence[ScorePair], threshold: float | None) -> Iterator[Row]:
    cut = threshold if threshold is not None else _between_two([p.before for p in pairs])
    if cut is None:
        return
    if threshold is not None:
        cuts = [threshold]
    elif len({p.after for p in pairs}) == 1:
        cuts = [cut]
    elif (two := _between_two([p.after for p in pairs])) is not None:
        cuts = [two]
    else:
        ordered = sorted(p.after for p in pairs)
        cuts = sorted({ordered[len(ordered) * n // DECILES] for n in range(1, DECILES)})
    for new_cut in cuts:
        counts = Counter((p.before >= cut, p.after >= new_cut) for p in pairs)
        agreed = counts[True, True] + counts[False, False]
        yield {
            "old_at_least": as_number(cut),
            "new_at_least": as_number(new_cut),
            "both": as_count(counts[True, True]),
            "only_old": as_count(counts[True, False]),
            "only_new": as_count(counts[False, True]),
            "neither": as_count(counts[False, False]),
            "agreement": as_share(ratio(agreed, len(pairs))),
            "kappa": as_number(kappa(counts)),
        }


@table("advantages", "Effect on groups: rewards of trajectories with the new score in place of the old")
def _advantages(by_domain: dict[str, list[ScorePair]]) -> Iterator[Row]:
    for domain, pairs in by_domain.items():
        members: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for pair in pairs:
            if pair.totals is not None:
                members[pair.group].append(pair.totals)
        groups = [totals for totals in members.values() if len(totals) > 1]
        flat = [(_flat([a for a, _ in totals]), _flat([b for _, b in totals])) for totals in groups]
        samples = [signs for totals in groups for signs in _advantage_signs(totals)]
        yield {
            "domain": domain,
            "groups": as_count(len(groups)),
            "order_changed": as_share(ratio(sum(map(order_changes, groups)), len(groups))),
            "no_signal_old": as_share(ratio(sum(old for old, _ in flat), len(groups))),
            "no_signal_new": as_share(ratio(sum(new for _, new in flat), len(groups))),
            "signal_changed": as_share(ratio(sum(old != new for old, new in flat), len(groups))),
            "sign_changed": as_share(ratio(sum(old != new for old, new in samples), len(samples))),
        }


@table("variance", "Variance of the new function's answers to the same item", optional=True)
def _variance(items: Sequence[RescoredItem]) -> Iterator[Row]:
    domains = sorted({one.kept.domain for one in items})
    for domain in (ALL, *(domains if len(domains) > 1 else ())):
        repeated = [one for one in items if domain in (ALL, one.kept.domain) and len(one.scores) > 1]
        if not repeated:
            continue
        within = fmean(_variance_of(one.scores) for one in repeated)
        # The variance of the means holds a share of the variance within items.
        noise = fmean(_variance_of(one.scores) / len(one.scores) for one in repeated)
        between = max(0.0, _variance_of([fmean(one.scores) for one in repeated]) - noise)
        yield {
            "domain": domain,
            "items": as_count(len(repeated)),
            "answers": as_count(max(len(one.scores) for one in repeated)),
            "within_item_sd": as_number(math.sqrt(within)),
            "between_items_sd": as_number(math.sqrt(between)),
            "reliability": as_share(ratio(between, between + within)),
            "changed": as_share(ratio(sum(not _flat(one.scores) for one in repeated), len(repeated))),
        }


@table("faults", "Faults", optional=True)
def _faults(items: Sequence[RescoredItem]) -> Iterator[Row]:
    for side, outcomes in (
        ("old", [one.old.outcome for one in items]),
        ("new", [answer for one in items for answer in one.answers]),
    ):
        kinds: Counter[tuple[str, str]] = Counter()
        for outcome in outcomes:
            if isinstance(outcome, InfraFault):
                kinds["platform", str(outcome.kind)] += 1
            elif isinstance(outcome, ModelFault):
                kinds["policy", outcome.reason[:80]] += 1
        for (of, kind), n in kinds.most_common():
            yield {
                "function": side,
                "fault_of": of,
                "kind": as_text(kind, wrap=True),
                "answers": as_count(n),
                "share": as_share(ratio(n, len(outcomes))),
            }


@table("cost", "Cost of the rescoring")
def _cost(found: Rescoring) -> Iterator[Row]:
    answers = sum(len(one.answers) for one in found.items)
    prices, models = found.prices, {bill.usage.model for bill in found.tokens}
    billed_s = math.fsum(call.billed_s for call in found.calls)
    usd = math.fsum(
        prices.function_usd(call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, gpu=found.gpu)
        for call in found.calls
    )
    cost = "billed" if prices.billed(found.provider) else "elsewhere"
    parts: list[tuple[str, int, float | None, float | None, str]] = [
        (f"calls on {found.provider}", len(found.calls), billed_s, usd, cost)
    ]
    for model in sorted(models):
        usages = [bill.usage for bill in found.tokens if bill.usage.model == model]
        priced = all(map(prices.prices_tokens, usages))
        usd_of = math.fsum(map(prices.token_usd, usages)) if priced else None
        requests = sum(usage.requests for usage in usages)
        parts.append((f"tokens of {model}", requests, None, usd_of, "billed" if priced else "no price"))
    for part, calls, seconds, dollars, kind in parts:
        yield {
            "part": part,
            "answers": as_count(answers),
            "calls": as_count(calls),
            "seconds": as_seconds(found.seconds),
            "billed_s": as_seconds(seconds),
            "usd": as_usd(dollars),
            "usd_per_million": as_usd(None if dollars is None else ratio(dollars * 1e6, answers)),
            "cost": kind,
        }


@table("differences", f"Largest differences (at most {SHOWN}; -o json and csv have every item)", optional=True)
def _differences(pairs: Sequence[ScorePair]) -> Iterator[Row]:
    changed = [p for p in pairs if abs(p.after - p.before) > EQUAL]
    for pair in sorted(changed, key=lambda p: (-abs(p.after - p.before), p.item.kept.id))[:SHOWN]:
        yield {
            "trajectory": pair.item.kept.id,
            "domain": pair.item.kept.domain,
            "old": as_number(pair.before),
            "new": as_number(pair.after),
            "difference": as_number(pair.after - pair.before),
        }


@table("items", "Items", people=False)
def _items(items: Sequence[RescoredItem]) -> Iterator[Row]:
    for one in items:
        first = one.answers[0]
        yield {
            "trajectory": one.kept.id,
            "group": one.kept.group,
            "domain": one.kept.domain,
            "policy_version": as_count(one.kept.trajectory.v0),
            "old_version": one.old.version,
            "old": as_number(one.before),
            "new": as_number(one.after),
            "answers": " ".join("fault" if s is None else f"{s:.17g}" for s in map(score_of, one.answers)),
            "fault": f"{first.kind}: {first.detail}" if isinstance(first, InfraFault) else "",
        }


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None without variance on both sides."""
    if len(a) < 2:
        return None
    mean_a, mean_b = fmean(a), fmean(b)
    spread = math.sqrt(math.fsum((x - mean_a) ** 2 for x in a) * math.fsum((y - mean_b) ** 2 for y in b))
    joint = math.fsum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return max(-1.0, min(1.0, joint / spread)) if spread > 0 else None


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank (so that Pearson's of ranks is Spearman's)."""
    found = [0.0] * len(values)
    ranked = 0
    for _, tied in itertools.groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        same = list(tied)
        for index in same:
            found[index] = ranked + (len(same) + 1) / 2
        ranked += len(same)
    return found


def kappa(counts: Counter[tuple[bool, bool]]) -> float | None:
    """Cohen's: agreement beyond that of independent verdicts; None if both are constant."""
    n = counts.total()
    if not n:
        return None
    agreed = (counts[True, True] + counts[False, False]) / n
    old, new = ((counts[True, True] + counts[only]) / n for only in ((True, False), (False, True)))
    chance = old * new + (1 - old) * (1 - new)
    return None if chance >= 1.0 else (agreed - chance) / (1.0 - chance)


def order_changes(totals: Sequence[tuple[float, float]]) -> bool:
    """True if any two members of a group, of which one was better, are equal or in the other order now, or were equal
    and are not."""
    return any(_sign(a0 - b0) != _sign(a1 - b1) for (a0, a1), (b0, b1) in itertools.combinations(totals, 2))


def _advantage_signs(totals: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """The signs of each member's advantage over its group's mean, before and after."""
    old, new = fmean(a for a, _ in totals), fmean(b for _, b in totals)
    for before, after in totals:
        yield _sign(before - old), _sign(after - new)


def _sign(value: float) -> int:
    return 0 if abs(value) <= EQUAL else 1 if value > 0 else -1


def _flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= EQUAL


def _between_two(values: Sequence[float]) -> float | None:
    """The middle of scores that have two values; None for others."""
    found = sorted(set(values))
    return (found[0] + found[1]) / 2 if len(found) == 2 else None


def _variance_of(values: Sequence[float]) -> float:
    """The unbiased variance; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
