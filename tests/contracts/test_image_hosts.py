"""Images of environments on real hosts: pulled before the reset, preferred when hosts are chosen, errors reported."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path

import pytest

from rollart.errors import EnvironmentFault
from rollart.supervise.environment_hosts import HostedEnvironment, prepare_environment
from tests.contracts import host_fixture
from tests.contracts.host_fixture import hosts_of, resolved_with
from tests.e2e.harness import ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
"""For whatever is waited for."""


def test_images_are_there_before_the_reset_and_hosts_that_have_them_are_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    for name in ("base", "task0", "task1"):  # task2 is nowhere
        (tmp_path / "words").write_text(f"words of {name}")
        with tarfile.open(store / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / "words", "words")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ROLLART_TEST_IMAGES", str(cache))
    monkeypatch.setitem(host_fixture.DOMAINS, "pictured", "tests.contracts.warm_worlds:Pictured")
    resolved = resolved_with(
        tmp_path,
        workers=2,
        images="rollart.adapters.envs.images:TarImages",
        images_args={"store": str(store), "cache": str(cache)},
    )

    async def play() -> None:
        async with asyncio.timeout(LIMIT_S), hosts_of(resolved, tmp_path) as hosts:

            async def episode(seed: int) -> tuple[str, str]:
                environment = hosts.make("pictured")
                assert isinstance(environment, HostedEnvironment)
                await prepare_environment(environment, seed, f"episode {seed}")
                where = environment.host
                try:
                    return where, (await environment.reset(seed)).text
                finally:
                    await environment.close()

            first, text = await episode(3)
            assert text == "words of task0"
            assert sorted(path.name for path in cache.iterdir()) == ["base", "task0"]
            there = [await episode(seed) for seed in (3, 6, 9)]
            assert there == [(first, "words of task0")] * 3
            assert (await episode(1))[1] == "words of task1"

            environment = hosts.make("pictured")
            with pytest.raises(EnvironmentFault, match=r"image 'task2' could not .* on environment-") as told:
                await prepare_environment(environment, 2, "episode 2")
            assert told.value.host.startswith("environment-")
            await environment.close()

            plain = hosts.make("tale")  # it names no images, and goes where there is room
            await prepare_environment(plain, 1, "tale")
            assert isinstance(plain, HostedEnvironment)
            assert plain.host.startswith("environment-")
            await plain.reset(1)
            await plain.close()

        made = [event for event in hosts.events("environments_made") if event["domain"] == "pictured"]
        assert sum(event["pulled"] for event in {event["subject"]: event for event in made}.values()) >= 3

    asyncio.run(play())
