"""vLLM selected by the cluster file: disaggregated prefill and decode, on Ray, with weights through stores."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import BATCH, CLUSTER, MOVES_WEIGHTS, Home, Spec, events, sound, tiny
from tests.vllm.hosting import counted, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]

LIMIT_S = 600.0

STEPS = 4

VLLM: dict[str, Any] = {"dtype": "float32", "kv_gb": 0.064, "block_size": 32, "probe": 0.001}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="rollart-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def stored(store: dict[str, Any], **changes: Any) -> Spec:
    return tiny(steps=STEPS, weights={"store": store}, domains__0__advantage=MOVES_WEIGHTS, **changes)


def pulled(directory: Path) -> list[int]:
    """Versions that arrived on the engines' host, in order."""
    return [e["version"] for e in events(directory, "weights_pulled")]


def test_prefill_and_decode_with_weights_in_shared_memory(home: Home, shared_memory: Path) -> None:
    """KV travels over NIXL at every turn, and versions through a store, only their changes. Both engines of the host
    load its one copy, and each is checked against the trainer's probe (`engines.vllm.probe`) before it serves."""
    engines = {"prefill": 1, "decode": 1, "threads": 1, "max_slots": 16, "kind": "vllm", "vllm": VLLM}
    cluster = {**CLUSTER, "pools": [{"name": "here", "device": "cpu", "count": 3}], "engines": engines}
    store = {"kind": "files", "url": str(shared_memory / "store"), "local": str(shared_memory / "host")}
    spec = stored(store, model__context=128, model__init__max_position_embeddings=128, placement={"router": "remote"})
    spec["domains"][0]["environment_args"] = {"text": "move? " * 40}
    run = home.launch(spec, cluster=cluster)
    assert run.end(LIMIT_S) == 0, run.said
    sound(home.directory, steps=STEPS)
    assert pulled(home.directory) == list(range(STEPS + 1)), "one copy of each version for both engines"
    pushes = events(home.directory, "weights_pushed")
    assert pushes[0]["sent_bytes"] == pushes[0]["bytes"]
    assert all(0 < push["sent_bytes"] < push["bytes"] for push in pushes[1:])
    assert counted(home.directory, "decode-0", "external_tokens") > 0, "KV came from the prefill engine"
    assert counted(home.directory, "prefill-0", "generated_tokens") > 0
    assert events(home.directory, "engine_lost") == events(home.directory, "infra_fault") == []


def test_on_ray_with_weights_in_object_storage(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated nodes: the trainer's, and one whose actor runs vLLM as a subprocess and pulls from S3 (moto)."""
    pytest.importorskip("ray")
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        boto3.client("s3").create_bucket(Bucket="weights")
        cluster = {
            "name": "fleet",
            "runtime": {"backend": "ray", "health_s": 30},
            "devices": [{"name": "wide", "generation": "cpu", "source": "a core of this machine"}],
            "pools": [
                {"name": "h20", "device": "wide", "count": 1, "labels": {"gpu": "H20"}, "price": 1.0},
                {"name": "cores", "device": "cpu", "count": 1, "labels": {"gpu": "none"}},
            ],
            "engines": {"count": 1, "threads": 1, "device": "wide", "max_slots": 16, "kind": "vllm", "vllm": VLLM},
            "trainer": {"device": "cpu", "threads": 1},
        }
        store = {"kind": "s3", "url": "s3://weights/team", "local": str(home.path / "host")}
        run = home.launch(stored(store), cluster=cluster)
        assert run.end(LIMIT_S) == 0, run.said
    finally:
        server.stop()
    sound(home.directory, steps=STEPS)
    placed = {e["subject"]: e["node"] for e in events(home.directory, "actor_placed")}
    assert placed["engine-0"] == "h20-0"
    assert placed["trainer-0"] == "cores-0"
    assert pulled(home.directory) == list(range(STEPS + 1))
    assert counted(home.directory, "engine-0", "generated_tokens") >= 2 * STEPS * BATCH
    assert events(home.directory, "engine_lost") == events(home.directory, "infra_fault") == []
