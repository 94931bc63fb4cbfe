"""The experts that an engine reports: those of each token's first computation, whatever computed it and when."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollart.architecture import ExpertLayers, architecture_of, read_architecture
from rollart.engine.handoff import decode_block, encode_block
from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.engine.slots import ExpertTable
from rollart.engine.weights import read_tensors
from rollart.errors import UsageError
from rollart.generation import (
    CompletionAssembler,
    body_of_message,
    chunk_body,
    completion_body,
    completion_message,
    parse_completion,
    parse_completion_message,
    parse_request,
    request_body,
    request_message,
)
from rollart.model import Completion, CompletionChunk, FinishReason
from tests.engine.models import MOE, finish, job, publish, run_one, runner
from tests.engine.test_decoding import decoding

UNKNOWN = 255


def asking(of: EngineJob, first: int = 0) -> EngineJob:
    return dataclasses.replace(of, request=dataclasses.replace(of.request, experts_from=first))


Numbers = npt.NDArray[np.uint8]


def numbers(experts: tuple[bytes, ...]) -> Numbers:
    """[tokens, layers, active] of `MOE`, whose layers are the first and the third."""
    return np.frombuffer(b"".join(experts), np.uint8).reshape(len(experts), 2, 2)


def whole(directory: Path, ids: tuple[int, ...]) -> Numbers:
    """The experts of a sequence's tokens, each computed as the last of a prompt."""
    engine = runner(directory)
    one_by_one = (run_one(engine, asking(job(str(n), ids[:n], max_tokens=1))) for n in range(1, len(ids) + 1))
    return np.stack([numbers(one.completion.experts)[-1] for one in one_by_one])


def same(found: Numbers, expected: Numbers) -> None:
    """Each choice that is known is right; the last layer's is unknown only where no token was drawn from it."""
    known = found != UNKNOWN
    assert (np.sort(found) == np.sort(expected))[known].all()
    assert known[:, 0].all()


def test_the_turns_of_a_session_together_give_every_token(tmp_path: Path) -> None:
    directory, rng = publish(tmp_path, 3, MOE), random.Random(1)
    engine = runner(directory, step_tokens=4)
    ids: tuple[int, ...] = ()
    experts: tuple[bytes, ...] = ()
    drawn: list[int] = []
    for turn in range(3):
        prompt = (*ids, *(rng.randrange(61) for _ in range(5)))
        done = run_one(engine, asking(job(str(turn), prompt, session="s", max_tokens=6), len(experts))).completion
        assert (done.cached_tokens > 0) == (turn > 0)
        ids, experts = prompt + done.token_ids, experts + done.experts
        drawn += range(len(prompt) - 1, len(ids) - 1)
        assert len(experts) == len(ids) - 1
    same(numbers(experts), whole(directory, ids[:-1]))
    assert (numbers(experts)[drawn] != UNKNOWN).all(), "a drawn token's logits came from known experts"


@pytest.mark.parametrize("make", [runner, decoding])
def test_requests_of_one_step_get_their_own(tmp_path: Path, make: Callable[..., Runner]) -> None:
    """In a packed step, and in a decode step of a GPU: five rows, which are padded to six, beside a prefill."""
    directory, rng = publish(tmp_path, 0, MOE), random.Random(2)
    engine = make(directory, step_tokens=12)
    for n in (7, 1, 4, 2, 3, 12):
        engine.add(asking(job(str(n), [rng.randrange(61) for _ in range(n)], max_tokens=3)))
    for done in finish(engine).values():
        prompt, drawn = done.job.request.token_ids, done.completion
        found, expected = numbers(drawn.experts), whole(directory, prompt + drawn.token_ids[:-1])
        same(found, expected)
        assert (found[len(prompt) - 1 :] != UNKNOWN).all()


def test_experts_that_nobody_asked_for_are_not_reported(tmp_path: Path) -> None:
    assert run_one(runner(publish(tmp_path, 0, MOE)), job("a", [1, 2, 3])).completion.experts == ()


def test_a_token_keeps_its_experts_through_a_weight_update(tmp_path: Path) -> None:
    """KV is computed again under the new weights; the tokens drawn before it came from the old experts."""
    before, after = (publish(tmp_path / str(seed), seed, MOE) for seed in (0, 1))
    engine, prompt = runner(before), (5, 6, 7)
    engine.add(asking(job("a", prompt, max_tokens=8)))
    ended = [done for _ in range(4) for done in engine.step()]
    engine.load(read_tensors(after), 1)
    while engine.busy:
        ended += engine.step()
    (done,) = (one.completion for one in ended)
    assert [span.version for span in done.spans] == [0, 1]
    ids = prompt + done.token_ids[:-1]
    drawn_before = len(prompt) + done.spans[0].end - 1
    found, old, new = numbers(done.experts), whole(before, ids), whole(after, ids)
    same(found[:drawn_before], old[:drawn_before])
    same(found[drawn_before:], new[drawn_before:])
    assert not (np.sort(old) == np.sort(new)).all()


def test_a_prompt_without_an_answer_takes_the_new_experts(tmp_path: Path) -> None:
    before, after = (publish(tmp_path / str(seed), seed, MOE) for seed in (0, 1))
    engine, prompt = runner(before, step_tokens=4), tuple(range(10))
    engine.add(asking(job("a", prompt, max_tokens=2)))
    assert not engine.step()
    engine.load(read_tensors(after), 1)
    ended: list[FinishedJob] = []
    while engine.busy:
        ended += engine.step()
    done = ended[0].completion
    same(numbers(done.experts), whole(after, prompt + done.token_ids[:-1]))


def test_experts_travel_with_the_kv(tmp_path: Path) -> None:
    directory, prompt = publish(tmp_path, 0, MOE), tuple(range(9))
    prefilled = run_one(runner(directory), dataclasses.replace(job("p", prompt, max_tokens=1), export=True))
    assert prefilled.kv is not None
    block = decode_block(b"".join(encode_block(prefilled.kv)))
    assert block.experts is not None
    assert block.experts.shape == (9, 4)
    part = block.cut(4)
    assert part.experts is not None
    assert torch.equal(part.experts, block.experts[4:])
    decode = runner(directory)
    done = run_one(decode, asking(dataclasses.replace(job("d", prompt, max_tokens=4), imported=block))).completion
    assert decode.imported_tokens == 9
    local = run_one(runner(directory), asking(job("d", prompt, max_tokens=4))).completion
    assert done.token_ids == local.token_ids
    assert done.experts == local.experts


def test_kv_without_experts_leaves_them_unknown(tmp_path: Path) -> None:
    directory, prompt = publish(tmp_path, 0, MOE), tuple(range(9))
    block = run_one(runner(directory), dataclasses.replace(job("p", prompt, max_tokens=1), export=True)).kv
    assert block is not None
    bare = dataclasses.replace(block, experts=None)
    asked = asking(dataclasses.replace(job("d", prompt, max_tokens=3), imported=bare))
    found = numbers(run_one(runner(directory), asked).completion.experts)
    assert (found[:9] == UNKNOWN).all()
    assert (found[9:] != UNKNOWN).all()


@given(st.lists(st.binary(min_size=3, max_size=3), max_size=5), st.integers(0, 3) | st.none())
def test_requests_and_answers_carry_experts_in_both_forms(experts: list[bytes], first: int | None) -> None:
    request = dataclasses.replace(job("a", [1, 2], max_tokens=3, seed=4).request, experts_from=first)
    number, session, body = body_of_message(request_message(7, request))
    assert (number, session) == (7, "")
    for form in (request_body(request), body):
        assert parse_request(form, session="", fallback_id="").experts_from == first
    answer = Completion((1,), (-0.5,), (), FinishReason.LENGTH, experts=tuple(experts))
    assert parse_completion(completion_body("a", answer), 0).experts == answer.experts
    assert parse_completion_message(completion_message(7, answer)).experts == answer.experts
    assert len(completion_message(7, answer)) == 9 + bool(experts), "none for a model without"
    streamed = CompletionAssembler("", 0, None, lambda: 0)
    streamed.add(json.dumps(chunk_body("a", CompletionChunk((1,), (-0.5,), 0), answer)).encode())
    assert streamed.completion().experts == answer.experts


@settings(deadline=None)
@given(st.integers(1, 700), st.data())
def test_numbers_of_any_size_are_kept(experts: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, min(3, experts)))
    layers = ExpertLayers(experts, active, 8, True, (0, 2))
    chosen = [np.array(data.draw(st.lists(st.integers(0, experts - 1), min_size=active, max_size=active)))[None]] * 2
    table = ExpertTable(2, 4, layers)
    table.record(np.array([1]), np.array([2]), np.array([3]), chosen)
    (found,) = table.read(1, 2, 4)
    assert len(found) == layers.token_bytes
    kind = np.uint8 if experts < 256 else "<u2"
    assert np.array_equal(np.frombuffer(found, kind).reshape(2, active), np.concatenate(chosen))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts": 0}, "num_experts is 0 (rule: a size"),
        ({"num_experts_per_tok": 9}, "num_experts is 8 and num_experts_per_tok 9 (rule: experts per token"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_settings_that_describe_no_experts_are_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(UsageError) as refused:
        architecture_of(MOE | changes, tmp_path)
    assert problem in str(refused.value)


def test_experts_in_one_tensor_are_read_like_those_of_a_hub_checkpoint(tmp_path: Path) -> None:
    directory = publish(tmp_path, 0, MOE)
    apart = load_file(directory / "model.safetensors")
    stacked = {name: tensor for name, tensor in apart.items() if ".experts." not in name}
    for layer in (0, 2):
        one = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([apart[f"{one}.{e}.{part}_proj.weight"] for e in range(8)]) for part in ("gate", "up", "down")
        )
        stacked |= {f"{one}.gate_up_proj": torch.cat((gate, up), 1), f"{one}.down_proj": down}
    save_file(stacked, directory / "model.safetensors")
    found = read_tensors(directory)
    assert found.keys() == apart.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in apart.items())
    Network(read_architecture(directory), context=1, device=torch.device("cpu"), dtype=torch.float32).check(found)
