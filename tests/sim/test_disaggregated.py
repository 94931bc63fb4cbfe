"""Modelled engines that hand KV over: the product's own protocol, its ways to fail, the time that the link takes."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from rollart.errors import HandoffFailed
from rollart.model import Completion, GenerateRequest, WeightsRef
from rollart.serving.handoff import decode_params, prefill_request
from rollart.sim.engine import DisaggregatedEngine, EngineLimits, KvFabric
from rollart.sim.links import LinkProfile, SharedLink
from rollart.sim.loop import run
from tests.contracts.engine_contract import PdContract, PdScenario, PdSubject
from tests.sim.models import roofline, steps, turn
from tests.sim.test_engine_contract import Unfolded

GB_PER_S = 10.0


def now() -> float:
    return asyncio.get_running_loop().time()


def made(count: int = 3, *, lease_s: float = 60.0, **limits: int) -> list[DisaggregatedEngine]:
    way = SharedLink(LinkProfile(GB_PER_S))
    fabric = KvFabric(lambda a, b: way, lease_s=lease_s)
    return [DisaggregatedEngine(f"e{i}", steps(), fabric, limits=EngineLimits(**limits)) for i in range(count)]


class TestModelledHandoff(PdContract):
    def run_pd(self, scenario: PdScenario) -> None:
        async def body() -> None:
            prefill, decode, alone = made()

            async def end() -> None:
                prefill.fail = True

            subject = PdSubject(*map(Unfolded, (prefill, decode, alone)), lambda v: WeightsRef(v, f"v{v}"), end)
            async with asyncio.timeout(60):
                await scenario(subject)

        run(body())


async def both_legs(source: DisaggregatedEngine, target: DisaggregatedEngine, request: GenerateRequest) -> Completion:
    answer = await source.generate(prefill_request(request, None))
    return await target.generate(dataclasses.replace(request, kv_transfer=decode_params(answer, source.id)))


def test_a_turn_takes_prefill_link_and_decode() -> None:
    async def main() -> tuple[float, int]:
        source, target, _ = made()
        c = await both_legs(source, target, turn("a", 8000, 101))
        return now(), c.cached_tokens

    model = roofline()
    link = 8000 * steps().kv_bytes_per_token / 1e9 / GB_PER_S
    decode = model.prefill_s(1, 7999) + sum(model.decode_step_s(1, 8001 + k) for k in range(100))
    assert run(main()) == (pytest.approx(model.prefill_s(8000, 0) + link + decode, rel=1e-6), 7999)


def test_hand_offs_share_the_link() -> None:
    async def main(count: int) -> float:
        source, target, _ = made()
        answers = []
        for i in range(count):
            request = turn(f"r{i}", 8000, 1)
            answer = await source.generate(prefill_request(request, None))
            answers.append(dataclasses.replace(request, kv_transfer=decode_params(answer, source.id)))
        began = now()
        await asyncio.gather(*map(target.generate, answers))
        return now() - began

    link = 8000 * steps().kv_bytes_per_token / 1e9 / GB_PER_S
    one, four = run(main(1)), run(main(4))
    assert one > link
    assert four - one == pytest.approx(3 * link, rel=0.1)


def test_kv_that_waits_is_memory_and_goes_when_its_lease_is_over() -> None:
    async def main() -> None:
        source, target, _ = made(lease_s=30.0, kv_tokens=10_000)
        request = turn("a", 6000, 10)
        answer = await source.generate(prefill_request(request, None))
        began = now()
        assert source.kv_used == 6000
        other = asyncio.create_task(source.generate(turn("b", 6000, 10)))
        await asyncio.sleep(29.0)
        assert not other.done(), "there is no room for it"
        await other
        assert now() > began + 30.0
        with pytest.raises(HandoffFailed):
            await target.generate(dataclasses.replace(request, kv_transfer=decode_params(answer, source.id)))

    run(main())


def test_the_next_turn_moves_only_what_is_new() -> None:
    async def main() -> tuple[int, int]:
        source, target, _ = made()
        first = await both_legs(source, target, turn("a", 8000, 100, session="s"))
        moved = source.fabric.moved_tokens
        request = turn("b", 8600, 100, session="s")
        answer = await source.generate(prefill_request(request, first.kv_transfer))
        assert answer.cached_tokens == 8099
        await target.generate(dataclasses.replace(request, kv_transfer=decode_params(answer, source.id)))
        return moved, source.fabric.moved_tokens - moved

    # Back to the prefill engine come the 99 tokens whose KV was computed there; the tokens added there go on.
    assert run(main()) == (8000, 99 + 501)


def test_weights_that_change_in_the_middle_of_a_pull_break_the_hand_off() -> None:
    async def main() -> None:
        source, target, _ = made()
        request = turn("a", 30_000, 10)
        answer = await source.generate(prefill_request(request, None))
        task = asyncio.create_task(
            target.generate(dataclasses.replace(request, kv_transfer=decode_params(answer, source.id)))
        )
        await asyncio.sleep(0.1)
        await target.update_weights(WeightsRef(1, ""))
        with pytest.raises(HandoffFailed):
            await task
        assert target.kv_used == 0

    run(main())


def test_a_pull_waits_for_its_room_and_keeps_it_until_the_request_runs() -> None:
    """Three contexts of which two fit: the third's KV comes when one is done, and nothing is computed again."""

    async def main() -> tuple[list[int], list[float]]:
        source, *_ = made(kv_tokens=100_000)
        target = DisaggregatedEngine("small", steps(), source.fabric, limits=EngineLimits(kv_tokens=20_000))
        cached: list[int] = []
        used: list[float] = []

        async def one(name: str, output: int) -> None:
            cached.append((await both_legs(source, target, turn(name, 8000, output))).cached_tokens)
            used.append(target.kv_used)

        async with asyncio.TaskGroup() as tasks:
            for n, output in enumerate((100, 1000, 50)):
                tasks.create_task(one(f"s{n}", output))
        assert target.pinned == target.held_tokens == 0
        assert not target.reserved
        assert target.recomputed_tokens == 0
        return cached, used

    cached, used = run(main())
    assert cached == [7999] * 3
    assert max(used) <= 20_000


@pytest.mark.parametrize("what", ["death", "weights", "abort"])
def test_room_that_waits_or_is_taken_comes_back(what: str) -> None:
    async def main() -> None:
        source, *_ = made(kv_tokens=100_000)
        target = DisaggregatedEngine("small", steps(), source.fabric, limits=EngineLimits(kv_tokens=20_000))
        legs = [asyncio.ensure_future(both_legs(source, target, turn(f"s{n}", 8000, 1000))) for n in range(5)]
        await asyncio.sleep(0.01)
        while target.kv_used < 16_000:
            await asyncio.sleep(0.01)
        if what == "death":
            target.fail = True
            target.restart(0)
        elif what == "weights":
            for engine in (source, target):
                await engine.update_weights(WeightsRef(1, "v1"))
        else:
            for leg in legs:
                leg.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
        assert target.pinned == target.held_tokens == 0
        assert not target.reserved
        assert not target.ready
        again = turn("again", 15_000, 10)
        assert (await target.generate(again)).sampled == 10

    run(main())
