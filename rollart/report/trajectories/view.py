"""One trajectory for people and machines: messages and tokens, and the seconds and dollars of each phase. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from rollart.model import InfraFault, ModelFault, Outcome, Scored, Segment, SegmentKind
from rollart.report.render import MarkupElement, card, element, page
from rollart.report.tables import (
    Report,
    Row,
    as_count,
    as_number,
    as_seconds,
    as_text,
    as_usd,
    figure,
    table,
)
from rollart.report.trajectories.found import FoundTrajectory
from rollart.report.trajectories.listing import outcome_of

MESSAGES = "messages"


def trajectory_report(run: str, found: FoundTrajectory) -> Report:
    """Tables of one trajectory. That of its tokens is for machines."""
    tables = (_summary(found), _phases(found), _messages(found), _rewards(found), _tokens(found))
    notes = []
    if found.kept is None:
        why = f" (the run's `keep` is '{found.keep}')" if found.keep else ""
        notes.append(f"the content of {found.row.id} was not kept{why}, or is among the oldest that were deleted")
    if found.lives > 1:
        notes.append(f"{found.lives} trajectories had this id, in several lives of the run: this is the last one")
    return Report("trajectory", run, tables, tuple(notes))


@table("summary", "Trajectory")
def _summary(found: FoundTrajectory) -> Iterator[Row]:
    row, kept = found.row, found.kept
    values: list[tuple[str, str | float | None]] = [
        ("trajectory", row.id),
        ("domain", row.domain),
        ("outcome", outcome_of(row)),
        ("trained in step", row.step),
        ("into version", row.version),
        ("first token under version", row.v0 if row.v0 >= 0 else None),
        ("turns", row.turns),
        ("sampled tokens", row.action_tokens),
        ("computed prompt tokens", row.prompt_tokens),
        ("reward", row.score),
        ("success", None if row.success is None else "yes" if row.success else "no"),
        ("group", row.group),
        ("seed", None if kept is None else str(kept.trajectory.seed)),
        ("cut off", None if kept is None else "yes" if kept.trajectory.truncated else "no"),
        ("began at second", row.t0),
        ("ended at second", row.t1),
    ]
    for what, value in values:
        yield {"what": what, "value": as_text(value) if isinstance(value, str) else as_number(value)}


@table("phases", "Seconds and dollars")
def _phases(found: FoundTrajectory) -> Iterator[Row]:
    row, usd = found.row, found.usd
    yield {"phase": "engines", "seconds": as_number(row.engine_s), "usd": as_usd(usd["engine"])}
    yield {"phase": "reset of the environment", "seconds": as_number(row.reset_s), "usd": as_usd(usd["reset"])}
    yield {"phase": "environment", "seconds": as_number(row.env_s), "usd": as_usd(usd["environment"])}
    yield {"phase": "reward", "seconds": as_number(row.reward_s), "usd": as_usd(usd["reward"])}
    yield {"phase": "whole", "seconds": as_number(row.t1 - row.t0), "usd": as_usd(sum(usd.values()))}


@table(MESSAGES, "Messages", optional=True)
def _messages(found: FoundTrajectory) -> Iterator[Row]:
    if found.kept is None:
        return
    trajectory = found.kept.trajectory
    texts = {turn.index: turn for turn in trajectory.turns}
    for (index, sampled), group in itertools.groupby(trajectory.segments, key=_author):
        segments, turn = list(group), texts.get(index)
        logprobs = [p for segment in segments for p in segment.logprobs]
        text = "" if turn is None else turn.action if sampled else turn.observation
        yield {
            "turn": as_count(index),
            "author": "policy" if sampled else "environment",
            "tokens": as_count(sum(len(segment.token_ids) for segment in segments)),
            "versions": as_text(version_spans(segments) if sampled else None),
            "mean_logprob": as_number(fmean(logprobs) if logprobs else None),
            "env_reward": as_number(turn.env_reward if turn is not None and sampled else None),
            "text": as_text(text, wrap=True),
        }


def _author(segment: Segment) -> tuple[int, bool]:
    return segment.turn, segment.kind is SegmentKind.ACTION


def version_spans(segments: Sequence[Segment]) -> str:
    """`v3`, or `v3 × 40, v4 × 12` for an action that was sampled across a weight update."""
    if len(segments) == 1:
        return f"v{segments[0].policy_version}"
    return ", ".join(f"v{segment.policy_version} × {len(segment.token_ids)}" for segment in segments)


@table("rewards", "Rewards by function", optional=True)
def _rewards(found: FoundTrajectory) -> Iterator[Row]:
    for score in () if found.kept is None else found.kept.scores:
        calls = found.calls.get(score.function, ())
        yield {
            "function": score.function,
            "version": as_text(score.version[:12] or "in the run's process"),
            "weight": as_number(score.weight),
            "score": as_number(score.outcome.value if isinstance(score.outcome, Scored) else None),
            "outcome": as_text(outcome_text(score.outcome), wrap=True),
            "calls": as_text(", ".join(call.provider_id or f"{call.t0:.3f} s" for call in calls) or None, wrap=True),
            "call_seconds": as_seconds(sum(call.t1 - call.t0 for call in calls) if calls else None),
        }


def outcome_text(outcome: Outcome) -> str:
    """`scored`, with its metrics, or the fault."""
    match outcome:
        case Scored():
            return ", ".join(("scored", *(f"{name} {figure(value)}" for name, value in outcome.metrics.items())))
        case ModelFault():
            return f"fault of the policy: {outcome.reason}"
        case InfraFault():
            return f"fault of the platform ({outcome.kind}): {outcome.detail}"


@table("tokens", "Tokens", people=False)
def _tokens(found: FoundTrajectory) -> Iterator[Row]:
    for segment in () if found.kept is None else found.kept.trajectory.segments:
        logprobs = segment.logprobs or (None,) * len(segment.token_ids)
        for token_id, logprob in zip(segment.token_ids, logprobs, strict=True):
            yield {
                "turn": segment.turn,
                "kind": str(segment.kind),
                "token_id": token_id,
                "logprob": logprob,
                "version": segment.policy_version,
                "loss_mask": int(segment.kind is SegmentKind.ACTION),
            }


def trajectory_page(report: Report) -> str:
    """The report as a page, with the messages as they are written."""
    tables = tuple(replace(t, people=t.people and t.name != MESSAGES) for t in report.tables)
    return page(replace(report, tables=tables), message_cards(report))


def message_cards(report: Report) -> list[MarkupElement]:
    """A card for each message of the report."""
    messages = next(t for t in report.tables if t.name == MESSAGES)
    at = {column.name: n for n, column in enumerate(messages.columns)}
    cards: list[MarkupElement] = []
    for row in messages.rows:
        author, versions = row[at["author"]], row[at["versions"]]
        under = f"{row[at['tokens']]} tokens" + (f", {versions}" if versions else "")
        if isinstance(logprob := row[at["mean_logprob"]], float):
            under += f", mean log-probability {figure(logprob)}"
        text = element("div", str(row[at["text"]]), class_="message")
        cards.append(card(f"Turn {row[at['turn']]}: {author}", text, under=under))
    return cards
