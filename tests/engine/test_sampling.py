from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.engine.sampling import SamplingRows, invert, sample, uniforms


def rows(n: int, **changes: Any) -> SamplingRows:
    values: dict[str, Any] = {
        "temperature": np.ones(n, np.float32),
        "top_p": np.ones(n, np.float32),
        "seed": np.arange(n, dtype=np.uint64),
        "index": np.zeros(n, np.int64),
        "allowed": None,
        **changes,
    }
    return SamplingRows(**values)


def test_logprob_is_after_temperature_and_mask_and_before_top_p() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    legal = np.array([1, 4, 7])
    ids, logp = sample(
        logits.clone(),
        rows(
            4,
            temperature=np.full(4, 0.5, np.float32),
            top_p=np.full(4, 0.6, np.float32),
            allowed=[legal, None, legal, None],
        ),
    )
    for i in range(4):
        scaled = logits[i] / 0.5
        if i % 2 == 0:
            keep = torch.full((10,), float("-inf"))
            keep[legal] = scaled[legal]
            scaled = keep
            assert ids[i] in legal
        assert logp[i] == pytest.approx(float(scaled.log_softmax(-1)[ids[i]]), abs=1e-6)


def test_greedy_reports_temperature_one() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    ids, logp = sample(logits.clone(), rows(3, temperature=np.array([0.0, 0.0, 1.0], np.float32)))
    assert ids[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert logp[0] == pytest.approx(float(logits[0].log_softmax(-1)[ids[0]]), abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws: 30.1 is the 0.999 quantile at 10 degrees of freedom."""
    n, probs = 20_000, torch.tensor([0.3, 0.2, 0.1, 0.1, 0.08, 0.07, 0.05, 0.04, 0.03, 0.02, 0.01])
    for top_p in (1.0, 0.999999):  # both ways of drawing
        ids, _ = sample(probs.log().expand(n, -1).clone(), rows(n, top_p=np.full(n, top_p, np.float32)))
        seen = np.bincount(ids, minlength=11)
        want = n * probs.numpy()
        assert float(((seen - want) ** 2 / want).sum()) < 30.1


def test_the_largest_uniform_draws_a_token_that_has_probability() -> None:
    probs = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.1, 0.1, 0.7, 0.1], [1 / 3, 1 / 3, 1 / 3, 0.0]])
    u = torch.full((3, 1), 1.0 - 2.0**-24)
    for scale in (1.0, 0.9999999, 1.0000001):
        assert invert((probs * scale).cumsum(-1), u).tolist() == [1, 3, 2]


def test_uniforms_are_uniform_and_depend_on_both_counters() -> None:
    u = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100), 100))
    assert len(np.unique(u)) > 9_990
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(float(u.mean()) - 0.5) < 0.01
    assert abs(float(np.corrcoef(u[:-1], u[1:])[0, 1])) < 0.03


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    top_p=st.floats(0.05, 1.0),
    temperature=st.floats(0.1, 3.0),
    legal=st.one_of(st.none(), st.sets(st.integers(0, 19), min_size=1)),
)
def test_a_draw_is_legal_within_the_nucleus_and_blind_to_its_company(
    seed: int, top_p: float, temperature: float, legal: set[int] | None
) -> None:
    torch.manual_seed(seed % 1000)
    logits = torch.randn(3, 20) * 3
    allowed: npt.NDArray[np.int64] | None = None if legal is None else np.array(sorted(legal))
    t, p = np.float32(temperature), np.float32(top_p)
    together = rows(
        3,
        seed=np.full(3, seed, np.uint64),
        temperature=np.array([t, 0.0, 1.0], np.float32),
        top_p=np.array([p, 1.0, 0.5], np.float32),
        allowed=[allowed, None, np.array([0, 1])],
    )
    alone = rows(
        1,
        seed=np.full(1, seed, np.uint64),
        temperature=np.array([t]),
        top_p=np.array([p]),
        allowed=[allowed],
    )
    token = int(sample(logits.clone(), together)[0][0])
    assert token == int(sample(logits[:1].clone(), alone)[0][0])
    masked = logits[0].double() / float(t)
    if legal is not None:
        assert token in legal
        masked[[i for i in range(20) if i not in legal]] = float("-inf")
    probs = masked.softmax(-1)
    before = float(probs[probs > probs[token]].sum())
    assert before < float(p) + 1e-5
