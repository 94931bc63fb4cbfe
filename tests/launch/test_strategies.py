"""`rollout.parallelism` in a simulated run: the product's fleet resizes engines, and each device is billed once."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.fleet import EngineKind, EngineRole
from rollart.launch.strategies import launch_reshard_settings, refuse_lending, reshard_settings
from rollart.ledger.reader import LedgerReader
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.tools.simulate import simulate

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 6, devices_per_host: 8}
"""

RUN = """\
name: r
model:
  context: 16384
  config:
    {model_type: qwen3, vocab_size: 1000, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 64,
     num_attention_heads: 16, num_key_value_heads: 16, head_dim: 128, tie_word_embeddings: false}
schedule: sync_plus
leases: {generate_s: 36000, train_s: 36000, publish_s: 36000, reward_s: 3600}
batch: {trajectories: 112}
placement: {tensor_parallel: [1], prefill_decode: "off", train: {pool: big, devices: 2}, rebalance: {horizon_s: 1.0e+8}}
rollout: {parallelism: {rise: 1.0, quiet_steps: 2}}
domains:
  - name: chat
    environment: tests.envs:Lake
    group_size: 4
    max_turns: 1
    max_tokens: 16000
    profile:
      turns: 1
      first_tokens: 500
      new_tokens: 0
      output_tokens: {mean: 9000, p90: 14000}
"""

Make = Callable[..., Resolved]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Made once per run: solving the plan takes longer than most simulations of it."""
    directory = tmp_path_factory.mktemp("specs")

    @functools.cache
    def make(run: str = RUN) -> Resolved:
        (directory / "run.yaml").write_text(run)
        (directory / "cluster.yaml").write_text(CLUSTER)
        return forecast(read_specs(directory / "run.yaml", directory / "cluster.yaml"))

    make()
    return make


def test_engines_grow_where_they_preempt_and_every_device_is_billed_once(resolved: Make, tmp_path: Path) -> None:
    done = simulate(resolved(), tmp_path / "sim", steps=4)
    with LedgerReader(done.directory) as reader:
        changed = [(e.fields["before"], e.fields["after"]) for e in reader.events("parallelism_changed")]
        intervals = reader.intervals()
    assert changed[0] == (1, 2)
    seconds: dict[str, float] = defaultdict(float)
    for i in intervals:
        if i.role in ("engine", "trainer", "unused"):
            seconds[i.role] += (i.t1 - i.t0) * i.units
    assert sum(seconds.values()) == pytest.approx(6 * done.seconds, rel=1e-6)


def test_the_embedded_engine_refuses_what_it_cannot_be(resolved: Make) -> None:
    settings = launch_reshard_settings(resolved())
    assert settings is not None
    assert "has no tensor parallelism" in settings.refuses(EngineKind("big", EngineRole.ENGINE, 2))
    assert settings.refuses(EngineKind("big", EngineRole.ENGINE, 1)) == ""


def test_vllm_engines_may_be_of_any_size_that_the_host_allows(resolved: Make) -> None:
    run = resolved()
    engines = run.cluster.engines.model_copy(update={"kind": "vllm"})
    settings = launch_reshard_settings(replace(run, cluster=run.cluster.model_copy(update={"engines": engines})))
    assert settings is not None
    assert settings.refuses(EngineKind("big", EngineRole.ENGINE, 2)) == ""


def test_sizes_are_doublings_that_the_model_and_the_host_allow(resolved: Make) -> None:
    settings = reshard_settings(resolved())
    assert settings is not None
    assert settings.rules["big"].sizes == (1, 2, 4)
    small = reshard_settings(resolved(RUN.replace("{rise: 1.0", "{sizes: [2], rise: 1.0")))
    assert small is not None
    assert small.rules["big"].sizes == (1, 2)
    assert reshard_settings(resolved(RUN.replace("rollout: {parallelism: {rise: 1.0, quiet_steps: 2}}\n", ""))) is None


def test_larger_engines_are_faster_where_they_hold_more(resolved: Make) -> None:
    """Twice the devices read the weights once, and leave more than twice the memory free."""
    settings = reshard_settings(resolved())
    assert settings is not None
    one, two = (settings.speed(EngineKind("big", EngineRole.ENGINE, tp), 5000.0) for tp in (1, 2))
    assert 0.5 < two / one < 2.0


LENDING = (
    RUN.replace("rollout: {parallelism: {rise: 1.0, quiet_steps: 2}}", "rollout: {lending: {setup_s: 1}}")
    .replace("train: {pool: big, devices: 2}", "train: {pool: big, devices: 2, mfu: 0.003}, utilisation: 0.01")
    .replace("{mean: 9000, p90: 14000}", "{mean: 900, p90: 2000}")
    .replace("max_tokens: 16000", "max_tokens: 4000")
    .replace("trajectories: 112", "trajectories: 32")
    .replace("context: 16384", "context: 5000")
    + "training: {stream: true}\n"
)


def test_lent_seconds_are_training_and_every_device_is_billed_once(resolved: Make, tmp_path: Path) -> None:
    done = simulate(resolved(LENDING), tmp_path / "sim", steps=4)
    with LedgerReader(done.directory) as reader:
        lent, back = reader.events("engines_lent"), reader.events("engines_returned")
        intervals = reader.intervals()
    assert lent
    assert len(back) >= len(lent)
    trained = sum((i.t1 - i.t0) * i.units for i in intervals if i.role == "trainer" and i.resource != "trainer-0")
    assert trained > 0
    devices = ("engine", "trainer", "unused")
    seconds = sum((i.t1 - i.t0) * i.units for i in intervals if i.role in devices)
    assert seconds == pytest.approx(6 * done.seconds, rel=1e-6)


def test_a_real_trainer_takes_no_other_devices(resolved: Make) -> None:
    with pytest.raises(SpecError, match="the embedded trainer takes no other devices"):
        refuse_lending(resolved(LENDING))
    refuse_lending(resolved())
