"""What a run may ask of the ways to the trainer and to the engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.settings.load import load_run

Write = Callable[..., Path]
RUN = (Path(__file__).parent / "run.yaml").read_text()


def test_all_engines_at_once_and_nothing_beside_by_default(write: Write) -> None:
    weights = load_run(write()).weights
    assert (weights.update, weights.overlap, weights.store) == ("all", False, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("weights: {update: later}", "weights.update is 'later' (rule: 'all', 'delayed', 'staggered' or"),
        ("weights: {update: staggered, fraction: 0}", "weights.fraction is 0 (rule: greater than 0"),
        ("weights: {update: staggered, longest_s: 5}", "longest_s is given with update 'staggered' (rule: only with"),
        ("weights: {update: on_divergence, threshold: 0.1}", "with staleness 1 (rule: staleness of at least 2"),
        ("staleness: 2\nweights: {update: on_divergence}", "is on_divergence (rule: with weights.threshold)"),
        ("schedule: one_off\nweights: {update: delayed}", "weights.update is delayed under `schedule: one_off`"),
        ("weights: {store: {kind: tape, url: x}}", "weights.store.kind is 'tape' (rule: 'files' or 's3')"),
        ("weights: {store: {kind: s3, url: there}}", "weights.store.url is 'there' with kind s3 (rule: s3://BUCKET"),
        ("weights: {store: {kind: s3, url: 's3:///a'}}", "weights.store.url is 's3:///a' (rule: s3://BUCKET"),
        ("weights: {store: {kind: files, url: 's3://a'}}", "is 's3://a' with kind files (rule: a directory)"),
        ("weights: {store: {kind: files, url: a, local: b}}", "weights.store.local is 'b' (rule: an absolute path)"),
        ("weights: {store: {kind: files, url: a, in_flight: 0}}", "weights.store.in_flight is 0 (rule: "),
        ("BATCH sampler: token_budget", "batch.sampler is token_budget (rule: with batch.tokens)"),
        ("BATCH sampler: deadline", "batch.sampler is deadline (rule: with batch.deadline_s)"),
        ("BATCH deadline_s: 4", "batch.deadline_s is given with sampler 'fifo' (rule: only with deadline)"),
        ("schedule: sync\nBATCH {sampler: deadline, deadline_s: 4}", "deadline under `schedule: sync` (rule: a"),
        ("staleness: 0\nweights: {update: staggered}", "staggered with staleness 0 (rule: all, or staleness of at"),
    ],
)
def test_what_cannot_be_is_refused_at_its_place(write: Write, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write(spec_with(text)))
    assert problem in caught.value.message
    assert "run.yaml:" in caught.value.message, "the line of it"


def spec_with(text: str) -> str:
    """`BATCH key: value`, or a mapping, goes into the batch."""
    top, _, batch = text.partition("BATCH ")
    more = "".join(f"  {entry}\n" for entry in batch.strip("{}").split(", ") if entry)
    return RUN.replace("  trajectories: 16\n", f"  trajectories: 16\n{more}") + top.rstrip("\n") + "\n"
