"""The modelled engine against brute force, against the roofline, and against its invariants of memory and versions."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import EngineError
from rollart.model import Completion, FinishReason, PauseMode, WeightsRef
from rollart.sim.engine import ModelledEngine
from rollart.sim.loop import run
from tests.sim.models import engine, roofline, steps, turn
from tests.sim.reference import Ask, simulate


def now() -> float:
    return asyncio.get_running_loop().time()


ASKS = st.lists(st.builds(Ask, st.floats(0, 0.4), st.integers(1, 3000), st.integers(1, 40)), min_size=1, max_size=6)


async def play(e: ModelledEngine, asks: list[Ask]) -> list[float]:
    """When each ask was answered."""
    ends = [0.0] * len(asks)

    async def one(i: int) -> None:
        await asyncio.sleep(asks[i].at)
        c = await e.generate(turn(f"r{i}", asks[i].prompt, asks[i].output))
        assert sum(c.token_ids) == asks[i].output
        ends[i] = now()

    async with asyncio.TaskGroup() as tasks:
        for i in range(len(asks)):
            tasks.create_task(one(i))
    return ends


@settings(max_examples=8)
@given(ASKS, st.sampled_from([2, 256]), st.sampled_from(["H800", "H20"]))
def test_sharing_is_what_brute_force_gives(asks: list[Ask], slots: int, kind: str) -> None:
    limits = {"slots": slots, "step_tokens": 1024}
    ends = run(play(engine(kind=kind, **limits), asks))
    simulate(asks, steps(kind), slots=slots, chunk=1024, kv=steps(kind).kv_tokens, watermark=0)
    step = 2 * steps(kind).decoding(6).at(20_000)
    for ask, end in zip(asks, ends, strict=True):
        assert end == pytest.approx(ask.finished, rel=2e-3, abs=step)


def test_memory_pressure_is_what_brute_force_gives() -> None:
    asks = [Ask(0.001 * i, 200 + 40 * i, 300 - 30 * i) for i in range(5)]
    e = engine(kv_tokens=1500, watermark=0.0)
    ends = run(play(e, asks))
    simulate(asks, steps(), slots=256, chunk=8192, kv=1500, watermark=0)
    assert e.preemptions == sum(a.preempted for a in asks) > 0
    for ask, end in zip(asks, ends, strict=True):
        assert end == pytest.approx(ask.finished, rel=1e-2)


def test_one_turn_alone_takes_the_roofline_s_time() -> None:
    async def main() -> float:
        await engine().generate(turn("a", 2000, 501))
        return now()

    model = roofline()
    alone = model.prefill_s(2000, 0) + sum(model.decode_step_s(1, 2001 + k) for k in range(500))
    assert run(main()) == pytest.approx(alone, rel=1e-9)


def test_a_full_batch_takes_the_roofline_s_time_and_prefills_slow_it_down() -> None:
    async def main(late: int) -> tuple[float, float]:
        e = engine()
        async with asyncio.TaskGroup() as tasks:
            for i in range(32):
                tasks.create_task(e.generate(turn(f"r{i}", 200, 301)))
            await asyncio.sleep(0.5)
            for i in range(late):
                tasks.create_task(e.generate(turn(f"l{i}", 8000, 1)))
        return now(), e.prefill_s + e.decode_s

    seconds, busy = run(main(0))
    model = roofline()
    # The first prompt finds the engine idle; the others share the next step, and the first's second token comes there.
    prefills = steps().mixed(0, steps().work([(200, 0)], 8192)).at(0)
    prefills += steps().mixed(1, steps().work([(200, 0)] * 31, 8192)).at(201)
    together = sum(model.decode_step_s(32, 201 + k + 1 / 32) for k in range(299))
    assert seconds == pytest.approx(prefills + together + model.decode_step_s(31, 500), rel=1e-9)
    assert busy == pytest.approx(seconds)
    slower, _ = run(main(5))
    arithmetic = 5 * (model.prefill_s(8000, 0) - model.prefill_s(1, 0))
    assert 0.8 * arithmetic < slower - seconds < 1.2 * arithmetic


@settings(max_examples=15)
@given(st.data())
def test_memory_is_never_exceeded_and_all_is_answered(data: st.DataObject) -> None:
    """Whatever comes, whatever is aborted: KV within its bound, every token accounted for, seconds conserved."""
    cap = data.draw(st.integers(1000, 4000))
    count = data.draw(st.integers(1, 12))
    sizes = [(data.draw(st.integers(1, 600)), data.draw(st.integers(1, 300))) for _ in range(count)]
    starts = [data.draw(st.floats(0, 2)) for _ in range(count)]
    aborted = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    update_at = data.draw(st.floats(0, 2))

    async def main() -> None:
        e = engine(kv_tokens=cap, slots=data.draw(st.sampled_from([3, 256])), step_tokens=512)
        answers: dict[int, list[Completion]] = {i: [] for i in range(count)}

        async def session(i: int) -> None:
            await asyncio.sleep(starts[i])
            prompt, output = sizes[i]
            for k in range(3):
                if prompt + output > cap:
                    return
                c = await e.generate(turn(f"r{i}-{k}", prompt, output, session=f"s{i}"))
                answers[i].append(c)
                prompt += output + 10

        async def meddle() -> None:
            await asyncio.sleep(update_at)
            await e.abort([f"r{i}-{k}" for i in aborted for k in range(3)])
            await e.pause(PauseMode.KEEP)
            await asyncio.sleep(0.3)
            await e.update_weights(WeightsRef(1, ""))
            await e.resume()

        async def watch(over: asyncio.Event) -> None:
            while not over.is_set():
                assert e.kv_used <= cap + 1e-3
                await asyncio.sleep(0.0371)

        over = asyncio.Event()
        async with asyncio.TaskGroup() as outer:
            outer.create_task(watch(over))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(meddle())
                for i in range(count):
                    tasks.create_task(session(i))
            over.set()
        stats = await e.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        flat = [c for found in answers.values() for c in found]
        assert stats.generated_tokens == sum(sum(c.token_ids) for c in flat)
        assert e.prefill_s + e.decode_s <= now() + 1e-9
        for i, found in answers.items():
            for c in found:
                assert c.finish is FinishReason.ABORT or sum(c.token_ids) == sizes[i][1]
                assert [s.version for s in c.spans] in ([], [0], [1], [0, 1])
                assert len(c.spans) == len(c.token_ids) == len(c.logprobs)

    run(main())


def test_preempted_work_is_computed_again_and_counted() -> None:
    async def main() -> ModelledEngine:
        e = engine(kv_tokens=1300, watermark=0.0)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(e.generate(turn("a", 500, 300)))
            second = tasks.create_task(e.generate(turn("b", 400, 300)))
        assert (first.result().prompt_tokens, second.result().prompt_tokens) == (500, 400)
        return e

    e = run(main())
    assert e.preemptions == 1
    # They have got 201 and 199 tokens when 900 + 400 fill the memory: one was prefilled a step before the other.
    assert e.recomputed_tokens == 400 + 199
    assert (e.prompt_tokens, e.generated_tokens, e.cached_tokens) == (900, 600, 0)


def test_a_session_s_prefix_is_found_and_the_oldest_is_evicted_first() -> None:
    async def main() -> list[int]:
        e = engine(kv_tokens=3000)
        found = []
        for name, session, prompt in [
            ("a1", "a", 900),
            ("b1", "b", 900),
            ("a2", "a", 1000),
            ("c1", "c", 1200),
            ("b2", "b", 1000),
            ("a3", "a", 1100),
        ]:
            found.append((await e.generate(turn(name, prompt, 50, session=session))).cached_tokens)
        return found

    # a keeps 1,049 and b 949. c, which ends with 1,250, takes the missing tokens from b, used before a; b then from a,
    # used before c.
    assert run(main()) == [0, 0, 949, 0, 702, 702]


def test_spans_say_exactly_what_was_sampled_before_and_after_an_update() -> None:
    async def main(at: float) -> tuple[Completion, int, float]:
        e = engine()
        task = asyncio.create_task(e.generate(turn("a", 1000, 400)))
        await asyncio.sleep(at)
        await e.pause(PauseMode.KEEP)
        before = (await e.stats()).generated_tokens
        await asyncio.sleep(5.0)
        await e.update_weights(WeightsRef(3, ""))
        await e.resume()
        return await task, before, now()

    model = roofline()
    begun = model.prefill_s(1000, 0)
    done = begun + sum(model.decode_step_s(1, 1001 + k) for k in range(120))
    c, before, end = run(main(done + 1e-6))
    assert before == 121
    assert c.token_ids == (121, 279)
    assert [(s.version, s.start, s.end) for s in c.spans] == [(0, 0, 1), (3, 1, 2)]
    again = model.prefill_s(1121, 0) + sum(model.decode_step_s(1, 1122 + k) for k in range(278))
    assert end == pytest.approx(done + 5.0 + again, abs=1e-4)
    unseen, before, _ = run(main(begun / 2))
    assert (before, unseen.token_ids, unseen.spans[0].version) == (0, (400,), 3)


def test_updates_in_a_row_give_a_span_each() -> None:
    async def main() -> Completion:
        e = engine()
        task = asyncio.create_task(e.generate(turn("a", 100, 900)))
        for version in range(1, 5):
            await asyncio.sleep(0.7)
            await e.pause(PauseMode.KEEP)
            await e.update_weights(WeightsRef(version, ""))
            await e.resume()
        return await task

    c = run(main())
    assert [s.version for s in c.spans] == [0, 1, 2, 3, 4]
    assert sum(c.token_ids) == 900


def test_an_abort_frees_its_memory_and_its_slot_at_once() -> None:
    async def main() -> tuple[int, float, float, float]:
        e = engine(slots=1)
        long = asyncio.create_task(e.generate(turn("long", 1000, 10_000)))
        short = asyncio.create_task(e.generate(turn("short", 1000, 10)))
        await asyncio.sleep(2.0)
        used = e.kv_used
        await e.abort(["long"])
        freed, c = e.kv_used, await long
        await short
        assert c.finish is FinishReason.ABORT
        return sum(c.token_ids), used, freed, now()

    tokens, used, freed, end = run(main())
    assert used == pytest.approx(1000 + tokens, abs=1)
    assert freed == 1001  # the request that waited
    assert end == pytest.approx(2.0 + roofline().prefill_s(1000, 0) + 9 * roofline().decode_step_s(1, 1005), rel=1e-3)


def test_a_dead_engine_breaks_what_is_in_flight_and_comes_back_empty() -> None:
    async def main() -> None:
        e = engine()
        await e.generate(turn("warm", 1000, 10, session="s"))
        task = asyncio.create_task(e.generate(turn("a", 2000, 500, session="s")))
        await asyncio.sleep(0.5)
        e.fail = True
        with pytest.raises(EngineError) as died:
            await task
        assert died.value.retryable
        assert not await e.healthy()
        with pytest.raises(EngineError):
            await e.generate(turn("b", 1, 1))
        await asyncio.sleep(10.0)
        busy = e.prefill_s + e.decode_s
        e.restart(4)
        assert busy == e.prefill_s + e.decode_s < 1.0
        c = await e.generate(turn("a", 2000, 500, session="s"))
        assert (c.cached_tokens, c.spans[0].version) == (0, 4)

    run(main())


@pytest.mark.parametrize("kind", ["H800", "H20"])
def test_no_batch_is_faster_than_the_roofline_allows(kind: str) -> None:
    """Tokens per second at several loads: rising, and below the limits of memory and arithmetic."""

    async def main(n: int) -> float:
        e = engine(kind=kind)

        async def client(i: int) -> None:
            for k in range(4):
                await e.generate(turn(f"{i}-{k}", 500, 200 + 10 * ((i * 7 + k) % 5)))

        async with asyncio.TaskGroup() as tasks:
            for i in range(n):
                tasks.create_task(client(i))
        return e.generated_tokens / now()

    rates = {n: run(main(n)) for n in (1, 4, 16, 64)}
    for few, many in itertools.pairwise(rates):
        assert rates[few] < rates[many] < many / few * rates[few] * 1.001
    for n, rate in rates.items():
        assert rate < n / roofline(kind).decode_step_s(n, 500)
