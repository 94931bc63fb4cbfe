"""A thousand episodes on hosts that are killed at random: the controller and the hosts agree on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from rollart.adapters.env_hosts.client import HostConnection
from rollart.errors import EnvironmentFault
from rollart.supervise.environment_hosts import HostedEnvironment
from tests.contracts.host_fixture import Hosts, hosts_of, resolved_with
from tests.contracts.stress_worlds import reward_of
from tests.e2e.harness import ROOT

pytestmark = pytest.mark.slow  # real processes, killed and started again: about 10 s

EPISODES, PLAYERS, PER_HOST, WORKERS = 1000, 48, 12, 3
KILLS = 8
LIMIT_S = 300.0


class Play:
    """Players that take one episode after the other, each as often as it takes."""

    def __init__(self, hosts: Hosts, rng: Random) -> None:
        self.hosts, self.rng = hosts, rng
        self.left = list(range(EPISODES))
        self.rewards: dict[int, float] = {}
        self.won: dict[int, str] = {}
        self.faults: list[EnvironmentFault] = []
        self.most = self.kills = 0

    async def player(self) -> None:
        while self.left:
            seed, attempt = self.left.pop(), 0
            while seed not in self.rewards:
                attempt += 1
                await self.episode(seed, f"{seed}.{attempt}")

    async def episode(self, seed: int, name: str) -> None:
        environment = self.hosts.make("logged")
        assert isinstance(environment, HostedEnvironment)
        try:
            await environment.prepare(seed, name)
            self.most = max(self.most, *(host.live for host in self.hosts.fleet.hosts.values()))
            await environment.reset(seed)
            await environment.step("on")
            step = await environment.step(name)
            assert step.done
            assert seed not in self.rewards
            self.rewards[seed], self.won[seed] = step.reward, name
            if len(self.rewards) % (EPISODES // (KILLS + 1)) == 0:
                self.kill()
        except EnvironmentFault as fault:
            self.faults.append(fault)
        finally:
            await environment.close()

    def kill(self) -> None:
        """Any host that serves. Its players are in the middle of their episodes."""
        serving = [h.link for h in self.hosts.fleet.hosts.values() if h.up]
        if serving:
            link = self.rng.choice(serving)
            assert isinstance(link, HostConnection)
            self.kills += 1
            with contextlib.suppress(ProcessLookupError):  # it was killed before, and that is not known yet
                os.kill(link.pid, signal.SIGKILL)


def test_hosts_and_controller_agree_on_a_thousand_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    log = tmp_path / "played"
    domains = {"logged": ("tests.contracts.stress_worlds:Logged", {"log": str(log)})}
    resolved = resolved_with(tmp_path, domains=domains, workers=WORKERS, per_worker=PER_HOST, health_s=60)

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), hosts_of(resolved, tmp_path) as hosts:
            play = Play(hosts, Random(7))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(PLAYERS):
                    tasks.create_task(play.player())
            fleet = hosts.fleet
            assert play.rewards == {seed: reward_of(seed) for seed in range(EPISODES)}
            played = Counter(line.split()[1] for line in log.read_text().splitlines())
            assert set(played.values()) == {1}, "no attempt is played twice"
            assert set(play.won.values()) <= set(played), "no reward without an episode that ended"
            assert play.most <= PER_HOST
            lost = hosts.events("host_lost")
            assert 1 <= len(lost) <= play.kills, "a dead host may be killed again before its death is known"
            assert play.faults
            assert all(fault.incident for fault in play.faults), "nothing but ends of hosts is met"
            assert {event["cause"] for event in lost} == {"its process was killed by SIGKILL"}
            # Both agree that no episode is held.
            assert {host.live for host in fleet.hosts.values()} == {0}
            assert (fleet.slots.queue.first(), fleet.slots.going, len(fleet.slots.ahead)) == (None, 0, 0)
            while not all(host.up for host in fleet.hosts.values()):  # the last that was killed
                await asyncio.sleep(0.05)
            for host in fleet.hosts.values():
                assert isinstance(host.link, HostConnection)
                assert (await host.link.health()).live == 0
                assert host.link.outstanding == 0

    asyncio.run(main())
