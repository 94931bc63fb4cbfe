"""Selection bias: trained against drawn trajectories, and lost against trained ones. Pure, from a ledger's rows.

If a schedule, a filter or a fault loses trajectories by their length, turns, difficulty or reward, the trained
distribution differs from the data's. Each figure of each set is compared by a two-sample Kolmogorov–Smirnov test.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollart.ledger.database import CONSUMED, DROPPED, LIVE
from rollart.ledger.reader import AttemptRow, GroupRow, LedgerReader
from rollart.model import AbortReason
from rollart.ports import FINISHED, RELAUNCH_MARK
from rollart.report.tables import Report, Row, as_count, as_number, as_share, as_text, ratio, table

DRAWN, TRAINED, DELAYED, OPEN = "drawn", "trained", "delayed", "open"
"""Sets besides the reasons of loss: prompts with a final outcome, the trained ones, drawn prompts that the schedule did
not start at once (`paced`), and prompts that were still running, or waited for training, when the run ended."""

REPEATED = "repeated"
"""Finished attempts that another attempt of the same member, which was trained, made superfluous."""

EXTERNAL_REASONS = frozenset({AbortReason.INFRA_FAULT, AbortReason.SHUTDOWN})
"""Outcomes that cut a trajectory regardless of its content: the next attempt represents the drawn sample."""

FIGURES = ("length", "turns", "difficulty", "reward")

SIGNIFICANCE = 0.01
"""Differences with a p-value below this are reported as findings."""

NOTES = (
    "length: sampled tokens; of trajectories that were cut short it is what they had reached: at least so much",
    "difficulty: mean reward of the scored trajectories of a prompt: the lower, the harder",
    "drawn: of each member of a group its first attempt (the next one, where a fault or the end of the run cut it)",
    "ks: largest distance of the two distributions; p: of chance, with prompts counted once (their members are alike); "
    "of trained against drawn it is that of trained against the rest",
)


@dataclass(frozen=True, slots=True)
class TrajectoryAttempt:
    """One attempt at a trajectory. `difficulty` is the mean reward of its prompt, `reward` its own, None where no
    reward is known; `first` is true if the attempt represents the drawn sample of its member."""

    domain: str
    prompt: str
    fate: str
    settled: bool
    first: bool
    cut: bool
    length: int
    turns: int
    difficulty: float | None
    reward: float | None
    delayed: bool = False


Prompts: TypeAlias = Mapping[tuple[str, str], int]
"""Prompts by (domain, fate)."""


def read_attempts(reader: LedgerReader) -> tuple[list[TrajectoryAttempt], Prompts]:
    """Every attempt of a run, and the number of prompts by their last outcome, prompts that never started included."""
    groups = {group.id: group for group in reader.groups()}
    last: dict[str, GroupRow] = {}
    for group in groups.values():
        last[_prompt(group.id)] = group
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for group in last.values():
        counts[group.domain.removesuffix(RELAUNCH_MARK), _group_fate(group)] += 1
    attempts = reader.attempts()
    late = {_prompt(event.subject) for event in reader.events("admission_deferred")}
    for prompt in late & last.keys():
        counts[last[prompt].domain.removesuffix(RELAUNCH_MARK), DELAYED] += 1
    scores: dict[str, list[float]] = defaultdict(list)
    standing: dict[tuple[str, str], int] = {}
    for n, attempt in enumerate(attempts):
        prompt, member = _named(attempt)
        if attempt.score is not None:
            scores[prompt].append(attempt.score)
        before = standing.get((prompt, member))
        if before is None or attempts[before].outcome in EXTERNAL_REASONS:
            standing[prompt, member] = n
    found = []
    for n, attempt in enumerate(attempts):
        prompt, member = _named(attempt)
        found.append(
            TrajectoryAttempt(
                attempt.domain,
                prompt,
                _fate(attempt, groups.get(attempt.trajectory.rpartition(".")[0])),
                settled=prompt in last and last[prompt].state != LIVE,
                first=standing[prompt, member] == n,
                cut=attempt.outcome != FINISHED,
                length=attempt.action_tokens,
                turns=attempt.turns,
                difficulty=_mean(scores[prompt]),
                reward=attempt.score,
                delayed=prompt in late,
            )
        )
    return found, dict(counts)


def bias(run: str, found: Sequence[TrajectoryAttempt], prompts: Prompts) -> Report:
    """The bias report."""
    by_domain: dict[str, list[TrajectoryAttempt]] = defaultdict(list)
    for one in found:
        by_domain[one.domain].append(one)
    sets = {domain: _sets(attempts) for domain, attempts in sorted(by_domain.items())}
    for domain, fate in prompts:
        sets.setdefault(domain, {}).setdefault(fate, [])
    return Report("bias", run, (_compared(sets), _described(sets, prompts)), NOTES)


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The Kolmogorov–Smirnov statistic: the largest difference of two empirical distributions, in O(n log n)."""
    a, b = sorted(a), sorted(b)
    return max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in {*a, *b})


def p_value(ks: float, n: int, m: int) -> float:
    """Chance that two samples of n and m from one distribution are `ks` apart or more: Kolmogorov's limit with
    Stephens' correction (1970), which is good to a few percent from n and m of about 20 on."""
    size = math.sqrt(n * m / (n + m))
    x = (size + 0.12 + 0.11 / size) * ks
    if x < 0.3:  # the series does not converge there, and the value is 1 to five places
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2.0 * math.fsum(terms)))


@table("bias", "Trained against drawn, and what was lost against trained")
def _compared(sets: Mapping[str, Mapping[str, Sequence[TrajectoryAttempt]]]) -> Iterator[Row]:
    for domain, by_fate in sets.items():
        for fate in by_fate:
            if fate not in (DRAWN, OPEN):
                against = DRAWN if fate in (TRAINED, DELAYED) else TRAINED
                for figure in FIGURES:
                    test = _test(figure, fate, by_fate[fate], by_fate.get(against, ()))
                    if test is not None:
                        yield {"domain": domain, "set": fate, "against": against, "figure": figure, **test}


def _test(
    figure: str, fate: str, sample: Sequence[TrajectoryAttempt], reference: Sequence[TrajectoryAttempt]
) -> Row | None:
    a, b = _values(sample, figure), _values(reference, figure)
    if not a or not b:
        return None
    ks = distance(a, b)
    rest, apart = reference, ks
    if fate == TRAINED:
        # The drawn set is the trained set plus the rest, so the rest differs more from the trained than the drawn does.
        rest = [one for one in reference if one.fate != TRAINED]
        left = _values(rest, figure)
        apart = distance(a, left) if left else 0.0
    p = p_value(apart, _prompts(sample, figure), _prompts(rest, figure)) if apart else 1.0
    mean, against = math.fsum(a) / len(a), math.fsum(b) / len(b)
    difference = mean / against - 1.0 if against else None
    finding = ""
    if p < SIGNIFICANCE:
        more = "higher" if mean > against else "lower" if mean < against else "spread otherwise"
        finding = (
            f"{figure} of {fate} is {more}"
            if fate in (TRAINED, DELAYED)
            else f"{fate} is no random loss: {figure} is {more}"
        )
    return {
        "mean": as_number(mean),
        "mean_against": as_number(against),
        "difference": as_share(difference),
        "ks": as_number(ks),
        "p": as_number(p),
        "finding": as_text(finding, wrap=True),
    }


@table("sets", "What was drawn, trained and lost (prompts: by their last fate; otherwise means over trajectories)")
def _described(sets: Mapping[str, Mapping[str, Sequence[TrajectoryAttempt]]], prompts: Prompts) -> Iterator[Row]:
    for domain, by_fate in sets.items():
        settled = sum(n for (name, fate), n in prompts.items() if name == domain and fate not in (OPEN, DELAYED))
        for fate, attempts in by_fate.items():
            lengths = sorted(_values(attempts, "length"))
            yield {
                "domain": domain,
                "set": fate,
                "prompts": as_count(settled if fate == DRAWN else prompts.get((domain, fate), 0)),
                "trajectories": as_count(len(attempts)),
                "cut_short": as_share(ratio(sum(one.cut for one in attempts), len(attempts))),
                "length": as_number(_mean(lengths)),
                "length_p50": as_number(_quantile(lengths, 0.5)),
                "length_p90": as_number(_quantile(lengths, 0.9)),
                **{figure: as_number(_mean(_values(attempts, figure))) for figure in FIGURES[1:]},
            }


def _sets(attempts: Sequence[TrajectoryAttempt]) -> dict[str, list[TrajectoryAttempt]]:
    """Drawn and trained first, then losses by name, then open prompts."""
    found: dict[str, list[TrajectoryAttempt]] = {
        DRAWN: [one for one in attempts if one.first and one.settled],
        TRAINED: [],
    }
    by_fate: dict[str, list[TrajectoryAttempt]] = defaultdict(list)
    for one in attempts:
        by_fate[one.fate].append(one)
    still = by_fate.pop(OPEN, None)
    found[TRAINED] = by_fate.pop(TRAINED, [])
    if delayed := [one for one in found[DRAWN] if one.delayed]:
        found[DELAYED] = delayed
    found |= dict(sorted(by_fate.items()))
    return found if still is None else found | {OPEN: still}


def _fate(attempt: AttemptRow, group: GroupRow | None) -> str:
    """The outcome of an attempt, or of its group if that decided it."""
    if attempt.outcome not in (FINISHED, AbortReason.GROUP_DROPPED):
        return OPEN if attempt.outcome == AbortReason.SHUTDOWN else attempt.outcome
    if attempt.sample == CONSUMED:
        return TRAINED
    fate = str(AbortReason.GROUP_DROPPED) if group is None else _group_fate(group)
    return REPEATED if fate == TRAINED else fate


def _group_fate(group: GroupRow) -> str:
    if group.state == DROPPED:
        return group.reason or str(AbortReason.GROUP_DROPPED)
    return TRAINED if group.state == CONSUMED else OPEN


def _prompt(group: str) -> str:
    return group.partition(RELAUNCH_MARK)[0]


def _named(attempt: AttemptRow) -> tuple[str, str]:
    """The prompt, and the member of its group: `lake-7~2.3r2` is member 3 of prompt `lake-7`."""
    group, _, member = attempt.trajectory.rpartition(".")
    return _prompt(group), member.partition("r")[0]


def _values(some: Iterable[TrajectoryAttempt], figure: str) -> list[float]:
    return [float(value) for one in some if (value := getattr(one, figure)) is not None]


def _prompts(some: Iterable[TrajectoryAttempt], figure: str) -> int:
    return len({one.prompt for one in some if getattr(one, figure) is not None})


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
