"""Two attached servers: adopted by a run, distinguished by their options, and left unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import yaml

from rollart.adapters.engines.vllm import VllmEngine
from rollart.adapters.engines.vllm_options import VllmOptions
from rollart.errors import EngineError, PartDied
from rollart.launch.engines import AttachedEngine
from rollart.launch.servers import serve_proxy
from rollart.model import EngineId, PauseMode, WeightsRef
from rollart.quickstart.tokenizer import write_tokenizer
from tests.contracts.engine_contract import request
from tests.e2e.harness import BATCH, CLUSTER, MOVES_WEIGHTS, Home, Process, events, ledger, processes, sound, tiny
from tests.engine.models import reference
from tests.proxy.agents import two_answers
from tests.vllm.hosting import can_hide, counted, needs_vllm, publish, server

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]

STEPS = 12
"""Steps of a tiny run: some are left when a server dies after the second."""


FEW = 2

PROBES = STEPS + 3
"""Maximum tokens that a server samples without a trajectory: one at each check of its weights."""

CONTEXT = 64
"""Maximum tokens of the tiny run's model."""


LARGER: dict[str, Any] = {
    **tiny()["model"]["init"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""A model large enough for device speed to matter: a step of the tiny one takes equally long everywhere."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def urls(root: Path) -> Iterator[list[str]]:
    model = publish(root / "v0", 0, tiny()["model"]["init"])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as starts:
        (root / "hidden").mkdir()
        made = [server(model, root / f"server-{i}.log", context=CONTEXT, hidden=root / "hidden") for i in (0, 1)]
        yield list(starts.map(stack.enter_context, made))


def cluster(urls: list[str]) -> dict[str, Any]:
    vllm = {"dtype": "float32", "probe": 0.001}
    engines = {"count": len(urls), "threads": 1, "max_slots": 16, "kind": "vllm", "attach": urls, "vllm": vllm}
    pools = [{"name": "theirs", "device": "cpu", "count": 2}, {"name": "here", "device": "cpu", "count": 1}]
    return {**CLUSTER, "pools": pools, "engines": engines}


def sampled(url: str) -> int:
    async def asked() -> int:
        engine = VllmEngine(EngineId("looked-at"), url)
        try:
            return (await engine.stats()).generated_tokens
        finally:
            await engine.close()

    return asyncio.run(asked())


def of_server(root: Path, number: int) -> list[Process]:
    """A server's processes, without the wrapper program."""
    log = f"server-{number}.log"
    (holder,) = [p for p in processes(root) if log in p.command and "vllm_server" in p.command]
    children = f"/proc/{holder.pid}/task/{holder.pid}/children"
    pids = set(map(int, Path(children).read_text().split()))
    return [p for p in processes(root) if p.pid in pids]


def hidden_from(root: Path, path: Path) -> bool:
    """True if a path of this machine exists for no process of both servers."""
    pids = [process.pid for number in (0, 1) for process in of_server(root, number)]
    return path.exists() and not any(Path(f"/proc/{pid}/root{path}").exists() for pid in pids)


async def version_of(url: str) -> int:
    engine = VllmEngine(EngineId("asked"), url)
    try:
        return (await engine.generate(request("asked", max_tokens=1))).spans[-1].version
    finally:
        await engine.close()


def test_a_server_of_other_options_is_not_taken(urls: list[str], root: Path) -> None:
    async def body() -> None:
        needed = VllmOptions(context=512, slots=99, block_size=16, connector="NixlConnector")
        part = AttachedEngine(EngineId("engine-0"), urls[0], needed=needed)
        try:
            with pytest.raises(PartDied) as refused:
                await part.start(WeightsRef(0, str(root / "v0")))
        finally:
            await part.close()
        for said in (
            urls[0],
            "--max-model-len is 64 (rule: at least model.context, 512)",
            "--max-num-seqs is 16",
            "--block-size is 32 (rule: 16)",
            "--kv-transfer-config is None",
        ):
            assert said in str(refused.value)
        engine = VllmEngine(EngineId("asked"), urls[1])
        try:
            with pytest.raises(EngineError, match="rollart_later: its plugin is older"):
                await engine.workers("rollart_later")
        finally:
            await engine.close()

    asyncio.run(body())


async def load(url: str, weights: WeightsRef) -> None:
    engine = VllmEngine(EngineId("loaded"), url)
    try:
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(weights)
        await engine.resume()
    finally:
        await engine.close()


def test_the_proxy_captures_what_vllm_sampled(urls: list[str], root: Path, tmp_path: Path) -> None:
    """An agent program over the chat API: the captured ids, versions and log-probabilities match a forward pass, and
    the prompt of its second turn starts with the tokens of the first."""
    write_tokenizer(tmp_path)
    weights = WeightsRef(3, str(publish(root / "v3", 3, tiny()["model"]["init"])))

    async def body() -> dict[str, Any]:
        for url in urls:
            await load(url, weights)
        async with serve_proxy(urls, tmp_path) as url:
            await two_answers(f"{url}/s/one/v1", "one", 0)
            async with aiohttp.ClientSession() as http, http.get(f"{url}/sessions/one") as answer:
                answer.raise_for_status()
                return cast(dict[str, Any], await answer.json())

    branches = asyncio.run(body())["branches"]
    assert sorted(sum(s["kind"] == "action" for s in branch["segments"]) for branch in branches) == [1, 2]
    for branch in branches:
        ids = [token for segment in branch["segments"] for token in segment["token_ids"]]
        expected = reference(root / "v3", ids)
        at = 0
        for segment in branch["segments"]:
            if segment["kind"] == "action":
                assert segment["policy_version"] == 3
                rows = [expected[at + i - 1, token].item() for i, token in enumerate(segment["token_ids"])]
                assert segment["logprobs"] == pytest.approx(rows, abs=1e-4)
            at += len(segment["token_ids"])


def test_agent_programs_are_trained_on_vllm(urls: list[str], tmp_path: Path) -> None:
    """Through the run's own proxy, with the engines of the run."""
    domain = {
        "name": "two",
        "environment": {"harness": "tests.proxy.agents:two_answers"},
        "group_size": 2,
        "max_turns": 4,
        "max_tokens": 1,
        "trajectories": BATCH,
    }
    home = Home(tmp_path)
    try:
        run = home.launch(tiny(steps=FEW, domains=[domain], functions=[]), cluster=cluster(urls))
        assert run.end(300) == 0, run.said
    finally:
        home.close()
    sound(home.directory, steps=FEW, paid={0.0, 0.5, 1.0})
    assert events(home.directory, "infra_fault") == events(home.directory, "engine_lost") == []
    with ledger(home.directory) as db:
        trained = db.execute("SELECT turns FROM trajectories WHERE outcome = 'finished'").fetchall()
    assert len(trained) >= FEW * BATCH
    assert set(trained) == {(2,)}, "the agent's summary is a branch of its own"


@pytest.fixture(params=["files", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A store that servers reach although the run's directory is hidden from them. Only the run has S3 credentials: the
    servers were started without any."""
    local = {"local": str(tmp_path / "host"), "kind": request.param}
    if request.param == "files":
        yield {**local, "url": str(tmp_path / "store")}
        return
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="weights")
        yield {**local, "url": "s3://weights/runs"}
    finally:
        moto.stop()


def test_servers_that_cannot_read_the_run_pull_from_its_store(
    urls: list[str], root: Path, store: dict[str, str], tmp_path: Path
) -> None:
    """Each version is transferred once for both servers of the host, only its changes, while they serve. Each server is
    checked against the trainer's probe before it serves with the version (`engines.vllm.probe`)."""
    inside = root / "hidden" / store["kind"]
    inside.mkdir()
    home = Home(inside)
    try:
        before = [sampled(url) for url in urls]
        spec = tiny(steps=FEW, weights={"store": store}, domains__0__advantage=MOVES_WEIGHTS)
        run = home.launch(spec, cluster=cluster(urls))
        assert run.end(300) == 0, run.said
        assert not can_hide() or hidden_from(root, inside)
    finally:
        home.close()
    sound(home.directory, steps=FEW)
    for kind in ("engine_lost", "infra_fault", "weights_not_pulled"):
        assert events(home.directory, kind) == [], run.said
    assert [e["version"] for e in events(home.directory, "weights_pulled")] == list(range(FEW + 1))
    first, *later = events(home.directory, "weights_pushed")
    assert first["sent_bytes"] == first["bytes"]
    assert all(0 < push["sent_bytes"] < push["bytes"] for push in later)
    received = sum(e["received_bytes"] for e in events(home.directory, "weights_pulled"))
    assert received == sum(push["sent_bytes"] for push in (first, *later))
    assert all(sampled(url) > count + FEW for url, count in zip(urls, before, strict=True)), "both serve"
    there = sorted(p.name for p in next((tmp_path / "host").iterdir()).iterdir() if p.name.startswith("v"))
    assert there == [f"v{v:06d}" for v in range(FEW + 1)][-len(there) :]
    for url in urls:
        assert asyncio.run(version_of(url)) == FEW


def test_turns_go_by_the_shares_of_a_plan_for_engines_of_different_speed(urls: list[str], tmp_path: Path) -> None:
    """The plan assumes that one device is three times as fast. The servers are equally fast, and almost no request
    waits at them, so their loads are the router's choice."""
    domains = tiny()["domains"]
    domains[0]["profile"] = {"turns": 2, "first_tokens": 8, "new_tokens": 3, "output_tokens": 1}
    model = {**tiny()["model"], "config": LARGER}
    speeds = {"quick": 3.0, "slow": 1.0, "trains": 40.0}
    devices = [
        {
            "name": name,
            "generation": "cpu",
            "source": "made up",
            "tflops_bf16": times,
            "memory_gb": 8,
            "memory_tb_per_s": 0.02 * times,
            "link_gb_per_s": 10,
            "devices_per_host": 1,
        }
        for name, times in speeds.items()
    ]
    pools = [{"name": f"of-{name}", "device": name, "count": 1, "price": 1.0} for name in speeds]
    fleet = {**cluster(urls), "devices": devices, "pools": pools, "trainer": {"device": "trains", "threads": 1}}
    home = Home(tmp_path)
    try:
        run = home.launch(tiny(steps=STEPS, domains=domains, model=model), cluster=fleet)
        assert run.end(300) == 0, run.said
    finally:
        home.close()
    sound(home.directory, steps=STEPS)
    quick, slow = (counted(home.directory, f"engine-{i}", "generated_tokens") for i in (0, 1))
    assert 1.3 * slow < quick < 6 * slow, (quick, slow, run.said)
    plan = yaml.safe_load((home.directory / "resolved.yaml").read_text())["plan"]
    assert plan["rates"], "something was predicted, and routed by"


def test_a_run_adopts_servers_and_goes_on_when_one_dies(urls: list[str], root: Path, tmp_path: Path) -> None:
    """Both serve; one is killed with -9 after two steps, and its turns move to the other. The survivor is neither
    stopped nor left paused, has the run's last weights, and serves other clients. The last test of this module."""
    (kept,), (killed,) = of_server(root, 0), of_server(root, 1)
    home = Home(tmp_path)
    try:
        before = sampled(urls[1])
        run = home.launch(tiny(steps=STEPS), cluster=cluster(urls))
        run.until(lambda: sampled(urls[1]) > before + PROBES, "both serve")
        run.until_step(2)
        killed.kill()
        assert run.end(300) == 0, run.said
    finally:
        home.close()
    sound(home.directory, steps=STEPS)
    lost = [(e["subject"], e["cause"]) for e in events(home.directory, "engine_lost")]
    assert lost == [("engine-1", f"nothing answers at {urls[1]}")], run.said
    assert events(home.directory, "infra_fault") == []
    assert "engine lost: engine-1" in run.said
    assert counted(home.directory, "engine-0", "generated_tokens") > 0, "what it did is in the ledger"
    assert kept.alive

    async def asked() -> None:
        engine = VllmEngine(EngineId("kept"), urls[0])
        try:
            assert not await engine.paused()
            answer = await engine.generate(request("after", max_tokens=4))
            assert [span.version for span in answer.spans] == [STEPS]
            assert (await engine.stats()).generated_tokens > STEPS
        finally:
            await engine.close()

    asyncio.run(asked())
