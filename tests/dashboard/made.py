"""A ledger for the dashboard's tests: two trained trajectories with content, a stale one, and a fault."""

from __future__ import annotations

from pathlib import Path

from rollart.ledger.kept import KeptScore, RoutedTurn
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, Scored, TrainSample, TrajectoryId
from rollart.ports import Interval, RunEvent
from rollart.settings.load import builtin, load_prices
from rollart.sim import loop
from serverless.types import Invocation
from tests.kept import charge, kept

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&\"'"
"""What a model may write."""

CONFIG = {
    "run": {"steps": 4, "schedule": "async", "staleness": 1, "domains": [{"name": "lake", "trajectories": 2}]},
    "prices": load_prices(builtin("prices.yaml")).model_dump(mode="json"),
}

ROUTES = (
    RoutedTurn(0.125, 0.25, 0.25, "engine-1", "", "least loaded", 3, 12),
    RoutedTurn(0.5, 0.5, 0.25, "engine-0", "", "sticky", 1, 4),
)

ENGINE = {"seconds": 10.0, "steps": 100.0, "generated_tokens": 800.0, "prompt_tokens": 1000.0, "cached_tokens": 250.0}


def write_run(directory: Path, *, steps: int = 1) -> Path:
    """A run of `steps` steps of one group each."""

    async def main() -> None:
        with Ledger(directory, clock=lambda: 0.0, inline=True, config=CONFIG, kept_mb=1) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            for n in range(steps):
                await ledger.admit(f"lake-{n}", "lake", n)
                done = [await _finish(ledger, f"lake-{n}.{m}", m, 2.0 * n + 1.0 + m) for m in range(2)]
                group = Group(GroupId(f"lake-{n}"), "lake", tuple(done))
                fields = {"version": n + 1, "step": n + 1, "train_s": 0.5, "waited_s": 0.25}
                ledger.event(RunEvent(2.0 * n + 2.5, "step", "training", fields))
                await ledger.commit(version=n + 1, step=n + 1, consumed=[group], metrics={"loss": 0.5 / (n + 1)})
            ledger.charge(charge("lake-99.0", "stale", score=None, success=None, t0=3.0, t1=9.0, v0=1))
            ledger.event(RunEvent(8.5, "infra_fault", "lake-99.1", {"detail": EVIL}))
            ledger.event(RunEvent(8.0, "engine_did", "engine-0", {**ENGINE, "kv_used": 0.5}))
            ledger.interval(Interval("engine", "engine-0", 0.0, 2.0, "busy", "", 1, 3600.0))
            ledger.interval(Interval("engine", "engine-0", 2.0, 10.0, "idle", "starved", 1, 3600.0))
            ledger.record(Invocation("exact", "aws_lambda", "w", 1.3, 1.4, 0.05, 0.1, 128, 1, "ok", provider_id="r-1"))

    loop.run(main())
    (directory / "resolved.yaml").write_text("")
    return directory


async def _finish(ledger: Ledger, id_: str, score: float, t1: float) -> TrainSample:
    one = (0,)
    group, trained = GroupId(id_.rpartition(".")[0]), (True,)
    done = TrainSample(TrajectoryId(id_), group, "lake", 1, one, trained, (0.0,), one, one, (0.0,), score, True)
    ledger.keep(kept(id_, EVIL, routes=ROUTES))
    ledger.scored(id_, score, (KeptScore("exact", "digest", 1.0, Scored(score, {})),))
    await ledger.finish(done, charge(id_, score=score, t0=t1 - 1.0, t1=t1, reward_s=0.25, reset_s=0.05, env_s=0.1))
    return done
