"""Which host an episode goes to: never more than half are left alone, a place is found while there is one, back-offs
double, and where all are equally bad none is quarantined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.policy.hosts import HostRules, HostSelector

RULES = HostRules()
NAMES = [f"environment-{n}" for n in range(6)]


def hosting(count: int) -> HostSelector:
    made = HostSelector(RULES)
    for name in NAMES[:count]:
        made.join(name)
    return made


def broken(made: HostSelector, bad: str, now: float, count: int, episodes: int = 20) -> list[str]:
    """Every host's episodes end, those of one in faults; the causes for which a host is left alone."""
    causes = []
    for _ in range(episodes):
        for name in NAMES[:count]:
            cause = made.ended(name, fault=name == bad, now=now)
            causes += [cause] if cause else []
    return causes


events = st.lists(
    st.tuples(
        st.sampled_from(["ended", "fault", "fast", "slow", "leave", "join", "wait", "restart"]), st.sampled_from(NAMES)
    ),
    max_size=200,
)


@given(events)
def test_at_most_half_are_left_alone_and_a_place_is_found_while_there_is_one(what: list[tuple[str, str]]) -> None:
    made, now = hosting(4), 0.0
    for kind, host in what:
        if kind == "join":
            made.join(host)
        elif kind == "wait":
            now += 7.0
        elif host in made.standing:
            match kind:
                case "leave":
                    made.leave(host, now)
                case "restart":
                    made.restarted(host)
                case "ended" | "fault":
                    made.ended(host, fault=kind == "fault", now=now)
                case _:
                    made.called(host, 30.0 if kind == "slow" else 0.001, now)
        away = [name for name, one in made.standing.items() if one.quarantined(now)]
        assert len(away) <= len(made.standing) // 2
        for most in (0, 1):
            room = {name: (n % 2, most) for n, name in enumerate(made.standing)}
            open_ = [name for name, (live, bound) in room.items() if live < bound]
            chosen = made.choose(room, now)
            assert (chosen is None) == (not open_)
            assert chosen is None or chosen in open_
            if chosen in away:
                assert all(made.standing[name].proofs for name in open_)


def test_the_least_loaded_gets_it_and_loads_stay_level() -> None:
    made = hosting(3)
    live = dict.fromkeys(NAMES[:3], 0)
    for _ in range(100):
        chosen = made.choose({name: (n, 40) for name, n in live.items()}, 0.0)
        assert chosen is not None
        live[chosen] += 1
        assert max(live.values()) - min(live.values()) <= 1
    assert made.choose(dict.fromkeys(live, (40, 40)), 0.0) is None


def test_a_host_that_fails_is_left_alone_and_comes_back_on_probation() -> None:
    made, bad = hosting(3), NAMES[1]
    (cause,) = broken(made, bad, 0.0, 3)
    assert cause == "100% of its episodes end in a fault, elsewhere 0%"
    room = dict.fromkeys(NAMES[:3], (0, 9))
    assert {made.choose({**room, NAMES[0]: (n, 9)}, 0.0) for n in (0, 5)} == {NAMES[0], NAMES[2]}
    later = RULES.shortest_s
    assert made.choose(room, later) == bad  # one at a time
    assert made.choose({**room, bad: (1, 9), NAMES[0]: (5, 9)}, later) == NAMES[2]
    for _ in range(RULES.proofs):
        assert made.ended(bad, fault=False, now=later) is None
    assert made.standing[bad].proofs == 0
    assert made.choose({**room, bad: (1, 9), NAMES[0]: (5, 9), NAMES[2]: (5, 9)}, later) == bad


def test_a_back_off_doubles_up_to_its_longest_until_it_goes_well() -> None:
    made, bad, now = hosting(3), NAMES[0], 0.0
    broken(made, bad, now, 3)
    lengths = []
    for _ in range(10):
        one = made.standing[bad]
        lengths.append(one.back_off_s)
        now = one.until
        assert made.ended(bad, fault=True, now=now) == "it failed again on probation"
    assert lengths == [min(RULES.shortest_s * 2**n, RULES.longest_s) for n in range(10)]


def test_what_fails_everywhere_is_nobodys_fault() -> None:
    made = hosting(4)
    for now in map(float, range(50)):
        for name in NAMES[:4]:
            assert made.ended(name, fault=True, now=0.0) is None
            assert made.called(name, 20.0, now) is None


def test_a_slow_host_is_left_alone_and_a_lone_one_never() -> None:
    made, alone = hosting(3), hosting(1)
    causes = []
    for second in range(10):
        for n, name in enumerate(NAMES[:3]):
            causes.append(made.called(name, 4.0 if n == 2 else 0.01, float(second)))
        assert alone.called(NAMES[0], 60.0, float(second)) is None
        assert alone.ended(NAMES[0], fault=True, now=0.0) is None
    (cause,) = [c for c in causes if c]
    assert "calls take 4.00 s beside their environments, elsewhere 0.01 s" in cause


@given(quick=st.integers(0, 20), waited=st.integers(1, 300), stall=st.floats(1.0, 60.0), after=st.floats(0.0, 60.0))
def test_one_stall_is_no_slow_host_however_many_calls_it_held_up(
    quick: int, waited: int, stall: float, after: float
) -> None:
    made, now = hosting(2), 0.0
    for _ in range(quick):
        now += RULES.apart_s
        assert [made.called(name, 0.01, now) for name in NAMES[:2]] == [None, None]
    for _ in range(RULES.min_samples):
        made.called(NAMES[0], 0.01, now := now + RULES.apart_s)
    now += stall
    assert [made.called(NAMES[1], stall, now + n * 1e-4) for n in range(waited)] == [None] * waited
    for _ in range(20):
        now += after
        assert made.called(NAMES[1], 0.01, now) is None


@pytest.mark.parametrize("episodes", [1, RULES.min_samples - 1])
def test_a_few_faults_are_no_verdict(episodes: int) -> None:
    assert broken(hosting(3), NAMES[0], 0.0, 3, episodes) == []


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)),
)
def test_images_draw_episodes_without_crowding_or_losing_any(
    room: dict[str, tuple[int, int]], missing: dict[str, int]
) -> None:
    hosting = HostSelector()
    for name in room:
        hosting.join(name)
    chosen, anyway = hosting.choose(room, 0.0, missing), hosting.choose(room, 0.0)
    assert (chosen is None) == (anyway is None), "a place is found whenever there is one"
    if chosen is None or anyway is None:
        return
    live, most = room[chosen]
    assert live < most
    rules = hosting.rules
    assert live <= rules.crowd * room[anyway][0] + rules.crowd_from
    assert missing.get(chosen, 0) <= missing.get(anyway, 0)
    if not missing:
        assert chosen == anyway
