"""The service over HTTP with its Python client, and TRL as an external trainer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.launch.servers import serve_service
from rollart.service import Service, ServiceError

ROOT = Path(__file__).parents[2]
COLUMNS = ["prompt", "response", "reward"]
TASKS = {"rollout": ["prompt"], "train": COLUMNS}


def with_service(scenario: Callable[[str], None], token: str = "") -> None:
    """The client blocks, so it runs in a thread beside the service's loop."""

    async def body() -> None:
        async with asyncio.timeout(120), serve_service(host="127.0.0.1", port=0, token=token) as url:
            await asyncio.to_thread(scenario, url)

    asyncio.run(body())


def test_a_trainer_and_an_engine_meet() -> None:
    def scenario(url: str) -> None:
        trainer, engine = Service(url), Service(url)
        with pytest.raises(ServiceError, match="PUT /v1/setup first"):
            engine.status()
        for one in (trainer, engine):
            one.init(COLUMNS, TASKS, whole_groups=["train"], capacity=8, staleness=1)
        with pytest.raises(ServiceError, match="set up otherwise"):
            engine.init(COLUMNS, {"rollout": ["prompt"]})
        ids = trainer.put_prompts([{"prompt": [1, 2]}, {"prompt": [3]}], group_size=2)
        assert trainer.get_experience("train", timeout_s=0) == []
        rows = engine.get_experience("rollout", 4)
        assert [(r.id, r["prompt"]) for r in rows] == list(zip(ids, [[1, 2], [1, 2], [3], [3]], strict=True))
        for row in rows:
            assert engine.put_experience(row.id, version=0, response=[4], reward=0.5)
        assert {len(batch) for batch in trainer.stream("train", 1, timeout_s=0)} == {2}
        trainer.weight_sync_notify(1, "/weights/v1")
        assert engine.weights(after=0, timeout_s=10) == (1, "/weights/v1")
        trainer.put_prompts([{"prompt": 1}])
        assert trainer.drop("g2") == ["g2.0"]
        assert not engine.put_experience("g2.0", response=1)
        trainer.put_prompts([{"prompt": 2}], group_size=8)
        for rows, status in ((1, 503), (9, 400)):
            with pytest.raises(ServiceError, match=f"{rows} rows do not fit") as refused:
                trainer.put_prompts([{"prompt": 1}], group_size=rows, timeout_s=0)
            assert refused.value.status == status
        for after in ("nan", "inf", "x"):
            with pytest.raises(ServiceError, match="is no number") as refused:
                trainer.weights(after=after)  # type: ignore[arg-type]
            assert refused.value.status == 400
        trainer.drop("g3")
        assert trainer.status()["counts"] == {
            "dropped.given up": 9,
            "late": 1,
            "put": 13,
            "taken.rollout": 4,
            "taken.train": 4,
        }

    with_service(scenario)


def test_calls_need_the_token_where_there_is_one() -> None:
    def scenario(url: str) -> None:
        with pytest.raises(ServiceError, match="not this service's"):
            Service(url).init(COLUMNS, TASKS)
        Service(url, token="secret").init(COLUMNS, TASKS)
        asked = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": "Bearer \xff"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=60)
        assert refused.value.code == 401

    with_service(scenario, token="secret")


def test_what_no_disk_can_hold_is_refused() -> None:
    def scenario(url: str) -> None:
        service = Service(url)
        with pytest.raises(ServiceError, match="no text"):
            service.init(["\ud800"], {"rollout": ["\ud800"]})
        service.init(COLUMNS, TASKS)
        for body in ({"key": "\ud800"}, {"tokens": 2**63}, {"group_size": 2**63}):
            asked = urllib.request.Request(
                f"{url}/v1/prompts", json.dumps({"prompts": [{"prompt": "a"}], **body}).encode(), method="POST"
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=60)
            assert refused.value.code == 400

    with_service(scenario)


def test_a_service_that_is_not_there_is_told() -> None:
    with pytest.raises(ServiceError, match="does not answer"):
        Service("http://127.0.0.1:1").status()


@pytest.mark.slow  # TRL's trainer, the engine and the service as processes: torch and transformers twice
@pytest.mark.timeout(1200)
def test_trl_learns_from_what_our_engine_generates() -> None:
    pytest.importorskip("trl")
    done = subprocess.run(
        [sys.executable, "examples/trl_trainer.py", "--steps", "12"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["steps"] == 12
    assert said["last"] > said["first"] + 0.3, "it learned to say yes"
    assert (said["service"]["version"], said["service"]["rows"]) == (12, 0)
    assert said["service"]["counts"] == {"put": 384, "taken.rollout": 384, "taken.train": 384}
