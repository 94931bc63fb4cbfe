"""KL to the run's first version, and columns filled before the step: bit for bit as in a step that computes them
itself."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollart.errors import TrainerError
from rollart.model import TrainSample
from rollart.train import checkpoint
from rollart.train.config import parse_config
from rollart.train.learner import Learner
from rollart.train.losses import kl_estimate
from tests.train.test_accumulation import ADVANTAGES, flat, groups, same, state
from tests.train.trainkit import batch, config, publish_version, sample

COLUMNS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def learner(root: Path, *, kl: float = 0.3, stream: bool = False, advantage: int = 0, **more: Any) -> Learner:
    """In float64, with version 0 published at the reference's path."""
    setup = config(
        root,
        domains={name: {"advantage": ADVANTAGES[advantage]} for name in "ab"},
        loss={"kl": kl, "entropy": 0.01} | more.pop("loss", {}),
        stream=stream,
        lr=1e-2,
        **more,
    )
    made = Learner(setup.model_copy(update={"model": setup.model.model_copy(update={"dtype": "float64"})}))
    if not checkpoint.version_path(root, 0).exists():
        publish_version(made, root, 0, ())
    return made


def filled(of: Learner, samples: list[TrainSample], *, reference: bool, advantage: bool) -> list[TrainSample]:
    """The samples with columns, computed separately: references of single samples, advantages of single groups."""
    out = []
    for group in dict.fromkeys(s.group for s in samples):
        mine = [s for s in samples if s.group == group]
        credit = np.split(of.advantages(batch(mine)), np.cumsum([len(s.token_ids) for s in mine])[:-1])
        for one, value in zip(mine, credit, strict=True):
            changes: dict[str, Any] = {"advantage": tuple(value)} if advantage else {}
            if reference:
                changes["reference"] = tuple(of.reference.logprobs(batch([one])))
            out.append(dataclasses.replace(one, **changes))
    return out


@pytest.mark.slow
@COLUMNS
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 5),
    stream=st.booleans(),
    advantage=st.integers(0, 2),
    kind=st.sampled_from(["pg", "ppo", "decoupled", "tis"]),
    which=st.sampled_from([(1, 0), (0, 1), (1, 1)]),
)
def test_columns_that_were_filled_before_give_the_bits_of_the_step_that_computes_them(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    stream: bool,
    advantage: int,
    kind: str,
    which: tuple[int, int],
) -> None:
    root = tmp_path_factory.mktemp("w")
    options: dict[str, Any] = {"stream": stream, "advantage": advantage, "loss": {"kind": kind}}
    step, streamed = learner(root, **options), learner(root, **options)
    samples = flat(groups(seed, count))
    before = filled(streamed, samples, reference=bool(which[0]), advantage=bool(which[1]))
    for version in (0, 1):
        one = step.train(batch(samples), version)
        other = streamed.train(batch(before), version)
        assert same(state(step), state(streamed))
        assert one.metrics["reference_kl"] == other.metrics["reference_kl"]


def test_a_streamed_step_is_penalised_like_the_one_that_is_not(tmp_path: Path) -> None:
    samples = flat(groups(5, 4))
    for advantage in (0, 1):
        whole, streamed = (learner(tmp_path, stream=s, advantage=advantage) for s in (False, True))
        for version in (0, 1, 2):
            one, other = whole.train(batch(samples), version), streamed.train(batch(samples), version)
            assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)
            assert one.metrics["reference_kl"] == pytest.approx(other.metrics["reference_kl"], rel=1e-5, abs=1e-12)


def test_a_reference_does_not_depend_on_what_else_is_there_nor_on_the_weights_now(tmp_path: Path) -> None:
    made = learner(tmp_path)
    samples = flat(groups(3, 5))
    before = made.reference.logprobs(batch(samples))
    assert before == pytest.approx(made.logprobs(batch(samples)), abs=1e-5), "version 0 is what it starts from"
    made.train(batch(samples), 0)
    shuffled = random.Random(1).sample(samples, len(samples))
    again = learner(tmp_path).reference.logprobs(batch(shuffled))
    ends = np.cumsum([len(s.token_ids) for s in shuffled])
    parts = dict(zip([s.id for s in shuffled], np.split(again, ends[:-1]), strict=True))
    assert (np.concatenate([parts[s.id] for s in samples]) == before).all()


def test_the_penalty_holds_the_policy_to_its_first_version(tmp_path: Path) -> None:
    """A reward moves the policy away; with a penalty it stays nearer. Without a penalty the KL is not measured."""
    samples = [
        sample(f"g{g}.{m}", turns=((3, 4),), group=f"g{g}", domain="a", seed=g, rewards=[float(m)], logprob=-3.0)
        for g in range(4)
        for m in range(2)
    ]
    moved = {}
    for kl in (0.01, 10.0):
        made = learner(tmp_path, kl=kl, loss={"kind": "pg", "entropy": 0.0})
        reports = [made.train(batch(samples), version) for version in range(8)]
        moved[kl] = [r.metrics["reference_kl"] for r in reports]
        assert moved[kl][0] == pytest.approx(0.0, abs=1e-9)
    assert moved[10.0][-1] < 0.5 * moved[0.01][-1]
    assert "reference_kl" not in learner(tmp_path, kl=0.0).train(batch(samples), 0).metrics


def test_the_penalty_has_the_gradient_of_its_formula(tmp_path: Path) -> None:
    """d/dlogπ of x − 1 − log x, x = π_ref/π, is 1 − x, which vanishes where both agree."""
    ours = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-1.0, -1.0, -3.0], dtype=torch.float64)
    kl_estimate(anchor, ours).sum().backward()
    assert torch.allclose(ours.grad, 1 - (anchor - ours.detach()).exp())


def test_another_checkpoint_may_be_the_reference(tmp_path: Path) -> None:
    moved = learner(tmp_path / "own", kl=0.0)
    samples = batch(flat(groups(3, 4)))
    moved.train(samples, 0)
    path = publish_version(moved, tmp_path / "other", 7)
    made = learner(tmp_path / "own", loss={"reference": str(path)})
    assert made.reference.logprobs(samples) == pytest.approx(moved.logprobs(samples), abs=1e-5)
    assert made.train(samples, 0).metrics["reference_kl"] > 1e-6


def test_online_dpo_learns_the_better_sample_of_each_group(tmp_path: Path) -> None:
    """Its loss begins at log 2, where the policy is the reference, and is measured before each update."""
    samples = [
        sample(f"g{g}.{m}", turns=((3, 4),), group=f"g{g}", domain="a", seed=g, rewards=[float(m)])
        for g in range(4)
        for m in range(3)
    ]
    preferred = {"algorithm": "online_dpo", "loss": {"kl": 0.3, "entropy": 0.0}}
    made = learner(tmp_path, minibatches=2, **preferred)
    before = made.logprobs(batch(samples))
    losses = [made.train(batch(samples), version).metrics["loss"] for version in range(3)]
    assert losses[0] == pytest.approx(np.log(2), rel=0.1)
    assert losses[2] < losses[1] < losses[0]
    change = (made.logprobs(batch(samples)) - before).reshape(4, 3, 7).sum((0, 2))
    assert change[2] > change[0]
    equal = [dataclasses.replace(s, rewards=(0.0,) * 7) for s in samples]
    still = learner(tmp_path, **preferred)
    weights = state(still)
    assert still.train(batch(equal), 0).metrics["grad_norm"] == 0.0
    assert all(torch.equal(v, state(still)[k]) for k, v in weights.items() if k != "counters")


@pytest.mark.slow  # twenty steps and their samples: 3 s
def test_a_student_becomes_its_teacher_on_its_own_samples(tmp_path: Path) -> None:
    """The exact KL(student ‖ teacher), at the tokens that the student reaches, falls to less than
    a third, whatever the task pays."""
    teacher = Learner(config(tmp_path, seed=1))
    with torch.no_grad():
        teacher.policy.model.get_input_embeddings().weight.mul_(6.0)  # tied: an opinion about the next token
    path = publish_version(teacher, tmp_path, 7)
    made = Learner(config(tmp_path, algorithm="opd", loss={"reference": str(path)}, domains={"a": {}}, lr=1e-2))
    generator, distances = torch.Generator().manual_seed(0), []

    def scored(of: Learner, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = of.policy.model(input_ids=ids).logits
        return logits.double().log_softmax(-1)

    for version in range(20):
        ids = torch.arange(8)[:, None]
        for _ in range(12):
            drawn = torch.multinomial(scored(made, ids)[:, -1].exp(), 1, generator=generator)
            ids = torch.cat((ids, drawn), 1)
        student, wanted = scored(made, ids[:, :-1]), scored(teacher, ids[:, :-1])
        distances.append(float((student.exp() * (student - wanted)).sum(-1).mean()))
        chosen = student.gather(2, ids[:, 1:, None])[:, :, 0]
        made.train(
            batch(
                [
                    dataclasses.replace(
                        sample(str(i), turns=[(1, 12)], rewards=[100.0]),
                        token_ids=tuple(row),
                        logprobs=(0.0, *chosen[i].tolist()),
                    )
                    for i, row in enumerate(ids.tolist())
                ]
            ),
            version,
        )
    assert distances[0] > 0.1
    assert distances[-1] < 0.3 * distances[0]


def test_a_reset_makes_the_latest_multiple_the_reference(tmp_path: Path) -> None:
    made = learner(tmp_path, loss={"reference_reset": 2})
    samples = batch(flat(groups(3, 4)))
    measured = []
    for version in range(4):
        measured.append(made.train(samples, version).metrics["reference_kl"])
        publish_version(made, tmp_path, version + 1)
    assert [kl < 1e-9 for kl in measured] == [True, False, True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_a_penalty_in_the_reward_is_the_same_reward_paid(tmp_path: Path, stream: bool) -> None:
    samples = flat(groups(5, 4))
    made = learner(tmp_path, stream=stream, advantage=1, loss={"kl_in": "reward", "kl_estimator": "k1"})
    paid = []
    for one in samples:
        reference = made.reference.logprobs(batch([one]))
        rewards = [
            r - 0.3 * (float(np.float32(p)) - q) if m else r  # as on the wire
            for r, p, q, m in zip(one.rewards, one.logprobs, reference, one.loss_mask, strict=True)
        ]
        paid.append(dataclasses.replace(one, rewards=tuple(rewards)))
    plain = learner(tmp_path, kl=0.0, stream=stream, advantage=1)
    made.train(batch(samples), 0)
    plain.train(batch(paid), 0)
    assert same(state(made), state(plain))


@pytest.mark.parametrize("stream", [False, True])
def test_factors_are_adapted_to_their_targets_and_go_on_in_the_next_life(tmp_path: Path, stream: bool) -> None:
    targets = {"kl_target": 1e-9, "entropy": 0.01, "entropy_target": 100.0, "entropy_step": 0.002}
    samples = batch(flat(groups(3, 4)))
    made = learner(tmp_path, stream=stream, loss=targets)
    first, second = (made.train(samples, version).metrics for version in (0, 1))
    path = publish_version(made, tmp_path, 2)
    later = learner(tmp_path, stream=stream, loss=targets)
    checkpoint.restore_version(later, path, 2)
    third = later.train(samples, 2).metrics
    assert [m["entropy_factor"] for m in (first, second, third)] == pytest.approx([0.01, 0.012, 0.014])
    # At first the policy is the reference, below any target; then it is far above this one.
    factors = [m["kl_factor"] for m in (first, second, third)]
    assert factors == pytest.approx([0.3, 0.3 * 0.98, 0.3 * 0.98 * 1.02])
    low = learner(tmp_path, stream=stream, loss={"entropy": 0.01, "entropy_target": 1e-3})
    assert [low.train(samples, version).metrics["entropy_factor"] for version in (0, 1)] == [0.01, 0.0]


def test_the_entropy_factor_rises_where_no_entropy_is_left(tmp_path: Path) -> None:
    """Of actions with one legal token it is exactly 0."""
    made = learner(tmp_path, kl=0.0, loss={"entropy_target": 0.5, "entropy_step": 0.002})
    one = sample("s")
    forced = dataclasses.replace(
        one, allowed=tuple((t,) if m else None for t, m in zip(one.token_ids, one.loss_mask, strict=True))
    )
    reports = [made.train(batch([forced]), version).metrics for version in range(3)]
    assert [m["entropy"] for m in reports] == [0.0, 0.0, 0.0]
    assert [m["entropy_factor"] for m in reports] == pytest.approx([0.01, 0.012, 0.014])


def test_the_factors_of_a_streamed_step_do_not_depend_on_the_order_of_its_groups(tmp_path: Path) -> None:
    targets = {"kind": "ppo", "kl_target": 6e-3, "entropy_target": 1.0}
    found = []
    for order in (1, -1):
        made = learner(tmp_path, stream=True, loss=targets)
        for version in (0, 1):
            made.begin(version)
            for group in groups(5, 6)[::order]:
                made.accumulate(batch(group))
            made.finish()
        found.append((made.counters, state(made)))
    assert 0.3 * 0.98 < found[0][0].kl < 0.3 * 0.98 * 1.02, "no bound of the controller hides the difference"
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_without_a_first_version_the_reference_says_so(tmp_path: Path) -> None:
    made = Learner(config(tmp_path, loss={"kl": 0.1}))
    with pytest.raises(TrainerError, match="reference policy is version 0, which is not at"):
        made.train(batch([sample("s")]), 0)


@pytest.mark.parametrize("vocab", [16, 32])
def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, vocab: int) -> None:
    """A larger one would give numbers, of other tokens."""
    teacher = publish_version(Learner(config(tmp_path, vocab=vocab)), tmp_path, 0)
    made = Learner(config(tmp_path / "run", algorithm="opd", loss={"reference": str(teacher)}))
    with pytest.raises(TrainerError, match=f"has a vocabulary of {vocab} .rule: 24, the policy's"):
        made.train(batch([sample("s")]), 0)


def test_advantages_of_the_whole_batch_are_no_column(tmp_path: Path) -> None:
    made = Learner(config(tmp_path, domains={"a": {"advantage": {"baseline": "domain"}}}))
    with pytest.raises(ValueError, match="domain 'a' are known only in the step, with the whole batch"):
        made.advantages(batch([sample("s")]))


def test_a_negative_penalty_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.loss\.kl: .* equal to 0"):
        parse_config({"model": {"init": {}}, "weights_root": "/nonexistent", "loss": {"kl": -1.0}})
