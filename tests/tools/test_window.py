"""Plans and simulations take publish times from the same code, and replans keep the spread of lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.problem import DomainProfile, Quantity
from placement.types import Role
from rollart.errors import SpecError
from rollart.fleet import DomainWork
from rollart.launch.plan import with_measured_work
from rollart.ledger.store import Ledger
from rollart.ports import Interval, RunEvent
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.tools.calibrate import fit_publish
from rollart.tools.simulate import simulate
from rollart.tools.window import sustained_slots

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 8, devices_per_host: 8}
  - {name: wide, device: H20, count: 8, devices_per_host: 8}
links:
  - {a: big, b: big, gb_per_s: 200}
  - {a: big, b: wide, gb_per_s: GBPS}
engines: {count: 2, threads: 4, device: H20}
trainer: {device: H800, threads: 8}
"""

RUN = """\
name: r
model:
  context: 16384
  config:
    {model_type: qwen3, vocab_size: 151936, hidden_size: 2560, intermediate_size: 9728, num_hidden_layers: 36,
     num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, tie_word_embeddings: true}
batch: {trajectories: 16}
domains:
  - name: chat
    environment: tests.envs:Lake
    group_size: 4
    max_turns: 8
    max_tokens: 512
    profile: {turns: 2, first_tokens: 100, new_tokens: 100, output_tokens: 100}
"""

TRANSPORTS = {
    "files": (),
    "store": ("weights.store={kind: files, url: store, bucket_mb: 500, in_flight: 1}",),
    "collective": ("weights.collective={}",),
}


def resolved(tmp_path: Path, gb_per_s: float, *overrides: str) -> Resolved:
    (tmp_path / "r.yaml").write_text(RUN)
    (tmp_path / "c.yaml").write_text(CLUSTER.replace("GBPS", str(gb_per_s)))
    return forecast(read_specs(tmp_path / "r.yaml", tmp_path / "c.yaml", overrides))


def published_s(tmp_path: Path, transport: str, gb_per_s: float) -> tuple[float, float]:
    """The publish time in the plan's table, and that of a simulation's first version that all engines waited for."""
    asked = resolved(tmp_path, gb_per_s, *TRANSPORTS[transport])
    assert {a.pool for a in asked.plan.of(Role.ENGINE)} == {"wide"}
    (held,) = sustained_slots(asked)
    done = simulate(asked, tmp_path / f"{transport}-{gb_per_s}", steps=2)
    one = next(m for m in done.moved if m.version == 1)
    return held.publish_s, one.push_s + max(one.exposed_s.values())


@pytest.mark.slow  # simulates nine runs
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_takes_as_long_in_plans_as_in_simulations_and_follows_the_link(
    tmp_path: Path, transport: str
) -> None:
    took = {}
    for gb_per_s in (1, 100, 1000):
        planned, simulated = published_s(tmp_path, transport, gb_per_s)
        assert simulated == pytest.approx(planned, rel=0.03), (transport, gb_per_s)
        took[gb_per_s] = planned
    assert took[1] > 5 * took[100] > 5 * took[1000] * 0.99
    assert took[1] >= 8.0, "eight GB of weights cross a link of one GB/s"


def test_a_papers_constants_are_a_preset(tmp_path: Path) -> None:
    preset = resolved(tmp_path, 1000, "cluster.publish.preset=rollart", *TRANSPORTS["store"])
    fast = resolved(tmp_path, 1000, "cluster.publish={preset: rollart, push_gb_per_s: 100}", *TRANSPORTS["store"])
    free = resolved(tmp_path, 1000, *TRANSPORTS["store"])
    (a,), (b,), (c,) = (sustained_slots(each) for each in (preset, fast, free))
    assert a.publish_s > 8 / 0.45 > b.publish_s > c.publish_s


def test_a_link_to_the_store_is_declared_like_one_between_pools(tmp_path: Path) -> None:
    slow = resolved(tmp_path, 1000, "cluster.links=[{a: big, b: store, gb_per_s: 0.5}]", *TRANSPORTS["store"])
    (held,) = sustained_slots(slow)
    assert held.publish_s > 16


def test_what_was_measured_is_as_varied_as_the_profile() -> None:
    domain = DomainProfile(
        "d", Quantity(2.0), Quantity(0.0), Quantity(1000.0, 700.0, 2000.0), first_tokens=Quantity(10.0)
    )
    work = DomainWork(share=1.0, turns=3.0, first_tokens=10, new_tokens=0, output_tokens=500, wait_s=0.0, finished=99)
    (found,) = with_measured_work([domain], {"d": work})
    assert found.output_tokens == Quantity(500.0, 350.0, 1000.0)
    assert found.turns == Quantity(3.0)


def test_measured_speeds_come_from_a_calibration_file_and_the_spec_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text('[{"publish": {"push_gb_per_s": 0.5, "load_gb_per_s": 100}}]')
    named = ("cluster.calibration=[speeds.json]", *TRANSPORTS["store"])
    (measured_s,) = sustained_slots(resolved(tmp_path, 1000, *named))
    (stated_s,) = sustained_slots(resolved(tmp_path, 1000, "cluster.publish={push_gb_per_s: 1}", *named))
    assert 16 < measured_s.publish_s < 17
    assert 8 < stated_s.publish_s < 9
    (tmp_path / "speeds.json").write_text('[{"publish": {"push": 0.5}}]')
    with pytest.raises(SpecError, match="calibration"):
        resolved(tmp_path, 1000, *named, "cluster.engines={}")


def test_a_runs_events_say_how_fast_its_versions_moved(tmp_path: Path) -> None:
    asked = resolved(tmp_path, 100, *TRANSPORTS["store"])
    with Ledger(tmp_path / "run", clock=lambda: 0.0, inline=True) as ledger:
        for version in (1, 2, 3):
            ledger.event(RunEvent(0.0, "step", f"s{version}"))
            ledger.event(RunEvent(0.0, "weights_pushed", f"v{version}", {"sent_bytes": 8 * 10**9, "seconds": 4.0}))
            ledger.event(RunEvent(0.0, "weights_pulled", "e", {"received_bytes": 8 * 10**9, "seconds": 5.0}))
            ledger.interval(Interval("engine", "e", 10.0 * version, 10.0 * version + 2.0, "sync"))
    speeds = fit_publish(asked, tmp_path / "run")
    assert (speeds.push_gb_per_s, speeds.pull_gb_per_s) == (2.0, 1.6)
    assert speeds.load_gb_per_s == pytest.approx(8.04 / 2, rel=0.05)
