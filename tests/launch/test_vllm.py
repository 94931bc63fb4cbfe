"""A planned engine as vLLM's command line, also in `launch --dry-run`."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from placement.types import Role
from rollart.adapters.engines.vllm_options import wrong_options
from rollart.adapters.engines.vllm_server import server_environment
from rollart.errors import SpecError, UsageError
from rollart.launch.layout import engine_actor, required_vllm_options
from rollart.launch.preflight import dry_run_lines
from rollart.launch.vllm import VllmInstallation, refuse_dead_servers, refuse_without_vllm, vllm_command
from rollart.settings.cluster import VllmSpec
from rollart.settings.load import builtin
from rollart.settings.resolve import Resolved, resolve_files

H200 = "name: h\npools: [{name: a, device: H200, count: 8}]\nengines: {kind: vllm, %s}\ntrainer: {threads: 2}\n"


def option(args: tuple[str, ...], name: str) -> str:
    return args[args.index(name) + 1]


def resolved(tmp_path: Path, engines: str, *overrides: str, cluster: str = H200) -> Resolved:
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster % engines)
    return resolve_files(None, path, overrides)


def test_an_engine_on_gpus_is_one_tensor_parallel_server() -> None:
    made = vllm_command(VllmSpec(memory=0.8, dtype="bfloat16"), devices=4, context=4096, slots=64)
    assert option(made.args, "--tensor-parallel-size") == "4"
    assert option(made.args, "--gpu-memory-utilization") == "0.8"
    assert option(made.args, "--max-model-len") == "4096"
    assert option(made.args, "--max-num-seqs") == "64"
    assert option(made.args, "--dtype") == "bfloat16"
    assert json.loads(option(made.args, "--weight-transfer-config")) == {"backend": "rollart"}
    assert option(made.args, "--logprobs-mode") == "processed_logprobs"
    assert "--kv-transfer-config" not in made.args
    assert "--enforce-eager" not in made.args
    assert made.env["VLLM_SERVER_DEV_MODE"] == "1"


def test_an_engine_on_cores_has_threads_and_its_own_kv_memory() -> None:
    made = vllm_command(VllmSpec(kv_gb=0.5), devices=3, cpu=True, context=4096, slots=8)
    assert option(made.args, "--kv-cache-memory-bytes") == "500000000"
    assert made.env["OMP_NUM_THREADS"] == "3"
    assert "--tensor-parallel-size" not in made.args
    assert int(option(made.args, "--max-num-batched-tokens")) >= 4096, "a prompt is computed in one step"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("cpu", [True, False])
def test_engines_that_hand_kv_over_have_a_connector(role: Role, cpu: bool) -> None:
    made = vllm_command(VllmSpec(), role=role, cpu=cpu, context=64, slots=8)
    config = json.loads(option(made.args, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_both")
    assert config["kv_buffer_device"] == ("cpu" if cpu else "cuda")
    assert config["kv_load_failure_policy"] == "fail"
    assert ("UCX_TLS" in made.env) == cpu


def test_kv_is_asked_for_at_the_address_of_the_engines_own_node() -> None:
    made = vllm_command(VllmSpec(), role=Role.DECODE, context=64, slots=8)
    env = server_environment("10.0.0.7", 5600, {**made.env, "PYTHONPATH": "/ours"})
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.7", "5600")
    assert "PYTHONPATH" not in env
    said = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.0.7"}
    assert (
        server_environment("10.0.0.7", 5600, vllm_command(VllmSpec(env=said), context=64, slots=8).env).items()
        >= said.items()
    )


def test_what_the_user_says_wins() -> None:
    spec = VllmSpec(args=["--max-num-seqs", "3"], env={"VLLM_SERVER_DEV_MODE": "0"})
    made = vllm_command(spec, context=64, slots=8)
    assert made.args[-2:] == ("--max-num-seqs", "3")
    assert made.env["VLLM_SERVER_DEV_MODE"] == "0"


def test_engines_take_several_gpus_where_they_are_vllms(tmp_path: Path) -> None:
    run = resolved(tmp_path, "count: 2, threads: 2, vllm: {python: /opt/vllm/bin/python}")
    one, two = (engine_actor(run, tmp_path, a) for a in run.plan.of(Role.ENGINE))
    assert one.args[1] == "rollart.adapters.engines.vllm_server"
    assert {one.kwargs["env"]["CUDA_VISIBLE_DEVICES"], two.kwargs["env"]["CUDA_VISIBLE_DEVICES"]} == {"0,1", "2,3"}


def test_vllm_must_be_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLART_VLLM_PYTHON", raising=False)
    run = resolved(tmp_path, "count: 1")
    with pytest.raises(SpecError, match="ROLLART_VLLM_PYTHON"):
        engine_actor(run, tmp_path, run.plan.of(Role.ENGINE)[0])
    monkeypatch.setenv("ROLLART_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert "/opt/vllm/bin/python" in engine_actor(run, tmp_path, run.plan.of(Role.ENGINE)[0]).args[2]


def test_a_dry_run_shows_every_server(tmp_path: Path) -> None:
    lines = list(dry_run_lines(resolved(tmp_path, "prefill: 1, decode: 1, threads: 2")))
    assert [line.split(":")[0] for line in lines] == ["prefill-0", "decode-0", "trainer-0"]
    assert all("vllm serve MODEL" in line and "--tensor-parallel-size 2" in line for line in lines[:2])
    urls = "[http://one:8000, http://two:8000]"
    attached = list(dry_run_lines(resolved(tmp_path, f"count: 2, attach: {urls}")))
    assert attached[1].startswith("engine-1: http://two:8000, which runs already, started with VLLM_SERVER_DEV_MODE=1")
    assert list(dry_run_lines(resolve_files(None, builtin("clusters/local.yaml")))) == []


def test_servers_that_cannot_be_are_told_of_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """By the cluster file, the environment variable, and the packages installed there."""
    monkeypatch.delenv("ROLLART_VLLM_PYTHON", raising=False)
    for engines, said in (
        ("count: 1", "nor is ROLLART_VLLM_PYTHON"),
        ("count: 1, vllm: {python: /nowhere/python}", "vLLM's interpreter /nowhere/python cannot be run: No such file"),
        ("count: 1, vllm: {python: /bin/true}", "no interpreter that vLLM could run under"),
        (f"count: 1, attach: ['http://127.0.0.1:{unused_tcp_port}']", "does not answer /health: Connection refused"),
    ):
        refuse = refuse_dead_servers if "attach" in engines else refuse_without_vllm
        with pytest.raises(UsageError, match=said) as refused:
            refuse(resolved(tmp_path, engines))
        assert refused.value.remedy


@pytest.mark.parametrize(("hidden", "said"), [(1024, "serves another model .*: hidden_size is 1024"), (96, "")])
def test_an_attached_server_of_another_model_is_refused_before_anything_is_made(
    tmp_path: Path, hidden: int, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_hidden_layers": 2}))

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "m", "root": str(tmp_path)}]}).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            run = resolved(tmp_path, f"count: 1, attach: ['http://127.0.0.1:{server.server_port}']")
            with contextlib.nullcontext() if not said else pytest.raises(UsageError, match=said):
                refuse_dead_servers(run)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("home", "engines", "said"),
    [
        (VllmInstallation("", False, False), "count: 1", "has no vLLM"),
        (VllmInstallation("0.32.0", False, True), "count: 1", "without rollart's plugin"),
        (VllmInstallation("0.32.0", True, False), "prefill: 1, decode: 1", "has no nixl"),
        (VllmInstallation("0.32.0", True, False), "count: 2", ""),
    ],
)
def test_what_is_not_installed_beside_vllm_is_named(
    home: VllmInstallation, engines: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.launch.vllm.vllm_home", lambda python: home)
    run = resolved(tmp_path, engines + ", vllm: {python: /opt/vllm/bin/python}")
    with contextlib.nullcontext() if not said else pytest.raises(UsageError, match=said):
        refuse_without_vllm(run)


def test_a_server_is_held_to_the_options_that_its_engine_would_be_started_with(tmp_path: Path) -> None:
    run = resolved(tmp_path, "prefill: 1, decode: 1, threads: 2, vllm: {dtype: bfloat16, block_size: 64}")
    needed = required_vllm_options(run, run.plan.of(Role.DECODE)[0])
    told = {
        "model_config": {"max_model_len": 4, "logprobs_mode": "raw_logprobs", "dtype": "torch.float16"},
        "scheduler_config": {"max_num_seqs": 1},
        "parallel_config": {"tensor_parallel_size": 1},
        "cache_config": {"block_size": 16},
        "weight_transfer_config": None,
        "kv_transfer_config": None,
    }
    assert [line.split(" ")[0] for line in wrong_options(needed, {"vllm_config": told})] == [
        "--max-model-len",
        "--max-num-seqs",
        "--logprobs-mode",
        "--weight-transfer-config",
        "--tensor-parallel-size",
        "--dtype",
        "--block-size",
        "--kv-transfer-config",
    ]
    right = {
        "model_config": {"max_model_len": 10**6, "logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"},
        "scheduler_config": {"max_num_seqs": 64},
        "parallel_config": {"tensor_parallel_size": 2},
        "cache_config": {"block_size": 64},
        "weight_transfer_config": {"backend": "rollart"},
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
    }
    assert wrong_options(needed, {"vllm_config": right}) == []
    assert wrong_options(needed, {}) == [], "another version may not tell"


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ("count: 2, attach: ['http://one:8000']", "names 1 servers (rule: as many as count"),
        ("count: 1, attach: [one]", "http or https URL"),
        ("count: 2, attach: ['http://one:8000', 'http://one:8000/']", "a server is named twice"),
        ("count: 1, vllm: {memory: 2}", "memory"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, engines: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolved(tmp_path, engines)
    assert said in str(refused.value)
    embedded = "name: h\npools: [{name: a, count: 8}]\nengines: {%s}\n"
    with pytest.raises(SpecError, match="kind: vllm"):
        resolved(tmp_path, "count: 1, attach: ['http://one:8000']", cluster=embedded)


def test_servers_that_pull_are_told_where_to(tmp_path: Path) -> None:
    attach, store = "count: 1, attach: ['http://one:8000']", "weights.store={kind: s3, url: 's3://weights'%s}"
    with pytest.raises(SpecError, match=r"weights\.store has no local"):
        resolved(tmp_path, attach, store % "")
    run = resolved(tmp_path, attach, store % ", local: /mnt/weights")
    assert run.run.weights.store is not None
    resolved(tmp_path, "count: 1", store % "")


def test_probabilities_cut_by_top_p_are_none_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="top_p"):
        resolved(tmp_path, "count: 1", "domains.frozen_lake.top_p=0.9")
