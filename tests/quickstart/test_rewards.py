"""The quickstart's reward functions: the list contract, and that each stands alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollart.adapters.envs.frozen_lake import draw_lake
from rollart.ports import EVAL_SEEDS_FROM
from rollart.quickstart import distance_model as training
from rollart.quickstart import rewards
from rollart.quickstart.rewards import distance_model, exact_match, process_verifier
from rollart.quickstart.spelling import SpellSteps

words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=10)
SOURCES = [Path(m.__file__ or "") for m in (distance_model, exact_match, process_verifier)]


def derivation(word: str) -> list[str]:
    return list(SpellSteps().derivation({"metadata": {"word": word}}))


def said(text: str, reference: str | None, **metadata: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": "<spell> :"}, {"role": "assistant", "content": text}]
    return {"id": "t-1", "messages": messages, "reference_answer": reference, "metadata": metadata}


def check(answers: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    assert [a["id"] for a in answers] == [i["id"] for i in items]
    for answer in answers:
        assert isinstance(answer["aggregate_reward_score"], float)
        assert all(set(m) == {"name", "value", "type"} for m in answer["metrics_list"])
        assert all(isinstance(step, float) for step in answer.get("step_rewards", []))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_function_is_a_file_of_its_own(source: Path) -> None:
    assert source.parent == Path(rewards.__file__ or "").parent
    imported = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= {"__future__", "os", "typing", "numpy", "safetensors"}


@given(word=words, other=words)
def test_exact_match_is_one_for_the_answer_alone(word: str, other: str) -> None:
    reference = word[::-1].capitalize()
    items = [said(" ".join(derivation(w)), reference) for w in (word, other)]
    items.append(said(" ".join(derivation(word)[:-1]), reference))
    answers = exact_match.handler(items)
    check(answers, items)
    assert [a["aggregate_reward_score"] for a in answers] == [1.0, float(word == other), 1.0]


def test_exact_match_without_a_mark_or_reference() -> None:
    assert exact_match.handler([said("4 s", "s")])[0]["aggregate_reward_score"] == 0.0
    assert exact_match.handler([said("", "")])[0]["aggregate_reward_score"] == 0.0
    assert exact_match.handler([said("1 + 2 = 3", "3")])[0]["aggregate_reward_score"] == 1.0
    with pytest.raises(ValueError, match="reference_answer"):
        exact_match.handler([said("= s", None)])


@given(word=words, tokens=st.lists(st.sampled_from(["1", "a", "=", "<eos>", "b"]), max_size=50))
def test_the_verifier_judges_each_token_by_its_own_position(word: str, tokens: list[str]) -> None:
    right = derivation(word)
    items = [said("", None, action_tokens=spoken, derivation=right) for spoken in (right, tokens)]
    answers = process_verifier.handler(items)
    check(answers, items)
    assert answers[0]["step_rewards"] == [1.0] * len(right)
    assert len(answers[1]["step_rewards"]) == len(tokens)
    assert all(
        paid == float(i < len(right) and token == right[i])
        for i, (token, paid) in enumerate(zip(tokens, answers[1]["step_rewards"], strict=True))
    )
    assert answers[1]["aggregate_reward_score"] == sum(answers[1]["step_rewards"])


def test_the_verifier_needs_worked_steps() -> None:
    with pytest.raises(ValueError, match="derivation"):
        process_verifier.handler([said("", None, action_tokens=[], derivation=[])])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, EVAL_SEEDS_FROM + 1000), path=st.lists(st.integers(0, 15), min_size=2, max_size=9))
def test_shaping_is_the_difference_of_a_potential(
    model: distance_model.DistanceModel, seed: int, path: list[int]
) -> None:
    grid = " ".join("".join(draw_lake(seed).rows))
    texts = [f"at:{cell // 4},{cell % 4} goal:up,left" for cell in path]
    items = [said("", None, observations=[f"<lake> {grid} {texts[0]}", *texts[1:]]) for _ in range(2)]
    answers = model(items)
    check(answers, items)
    assert len(answers[0]["step_rewards"]) == len(path) - 1
    ends = model.distances(distance_model.features([f"<lake> {grid} {texts[0]}", texts[-1]]))
    assert answers[1]["aggregate_reward_score"] == pytest.approx(distance_model.SHAPING * (ends[0] - ends[1]), abs=1e-4)


def test_no_items_no_answers(model: distance_model.DistanceModel) -> None:
    assert model([]) == []


def test_features_show_the_surroundings_of_the_player() -> None:
    rows = np.stack([row for row, _ in training.examples(draw_lake(3))])
    assert rows.shape == (16, 98)
    assert (rows[:, 49:].sum(axis=1) == 1.0).all()
    at_goal = rows[:, 49 + 24] == 1.0
    assert [left for (_, left), here in zip(training.examples(draw_lake(3)), at_goal, strict=True) if here] == [0.0]


@pytest.mark.slow
def test_the_trained_model_knows_the_way(tmp_path: Path) -> None:
    """Slow: trains for about four CPU seconds."""
    training.train(str(tmp_path), seed=0)
    model = distance_model.DistanceModel()
    model.load(str(tmp_path))
    data = [row for i in range(200) for row in training.examples(draw_lake(EVAL_SEEDS_FROM + i))]
    error = np.abs(model.distances(np.stack([x for x, _ in data])) - np.array([y for _, y in data]))
    assert error.mean() < 0.3
    assert (error < 0.5).mean() > 0.85


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> distance_model.DistanceModel:
    """Random weights in the artefact's format: the contract does not depend on what was learned."""
    directory, rng = tmp_path_factory.mktemp("artefact"), np.random.default_rng(0)
    shapes = {"0.weight": (8, 98), "0.bias": (8,), "1.weight": (1, 8), "1.bias": (1,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, str(directory / distance_model.WEIGHTS))
    loaded = distance_model.DistanceModel()
    loaded.load(str(directory))
    return loaded
