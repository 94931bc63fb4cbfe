"""Which runs hold their engines to a probe, and what it is."""

from __future__ import annotations

import pytest

from rollart.compose.agreement import agreement_sample
from rollart.spec.load import builtin
from rollart.spec.resolve import resolve_files

VLLM = builtin("clusters/local-vllm.yaml")


def test_the_probe_is_of_the_runs_length_and_scores_all_but_its_first_token() -> None:
    sample = agreement_sample(resolve_files(None, VLLM))
    assert sample is not None
    assert sample.loss_mask == (False, *(True,) * 47)
    assert len(set(sample.token_ids)) == 30
    short = agreement_sample(resolve_files(None, VLLM, ["model.context=32"]))
    assert short is not None
    assert len(short.token_ids) == 31


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.engines.kind=embedded"],
        ["cluster.engines.vllm.probe=0"],
        ["domains.frozen_lake.temperature=0.7", "domains.spell_backward.temperature=0.7"],
    ],
)
def test_engines_that_cannot_be_compared_are_not(changes: list[str]) -> None:
    assert agreement_sample(resolve_files(None, VLLM, changes)) is None
