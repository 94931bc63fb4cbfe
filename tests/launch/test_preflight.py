"""Problems of environments are reported with their line before anything starts, by the process that creates
environments.

Warnings of a run that can start: shown by validate, by the dry run and by the launch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli.main import run as rollart
from rollart.errors import SpecError
from rollart.launch.preflight import decide_workers, environment_problems, launch_warnings, refuse_files
from rollart.launch.prepare import prepare_tokenizer
from rollart.quickstart.tokenizer import write_tokenizer
from rollart.settings.load import SpecSources, builtin
from rollart.settings.resolve import read_specs, resolve_files
from tests.e2e.harness import CLUSTER, ROOT, changed, tiny

EXTRA = pytest.mark.slow
"""Needs an extra, such as Ray, that is installed for the slow tests."""

WORLDS = """
import ctypes, subprocess, time

class Whole:
    def __init__(self, size=4):
        if size < 2:
            raise ValueError(f"size {size} is too small")
    async def reset(self, seed): ...
    async def step(self, action): ...
    async def close(self): ...

class Quick(Whole):
    quick = True

class Exits(Whole):
    def __init__(self):
        raise SystemExit(7)

class Half:
    async def reset(self, seed): ...

class Dies(Whole):
    def __init__(self):
        print("about to")
        ctypes.string_at(0)

class Hangs(Whole):
    def __init__(self):
        print("not yet")
        time.sleep(3600)

class Serves(Whole):
    def __init__(self, note):
        with open(note, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "600"]).pid))
"""


def written(directory: Path, environment: str, arguments: dict[str, Any], **hosts: Any) -> tuple[Path, Path]:
    """A run with one domain from `NAME_worlds` (modules are cached by name), and its cluster."""
    module = f"worlds_of_{directory.name}".replace("-", "_")
    (directory / f"{module}.py").write_text(textwrap.dedent(WORLDS))
    one = {**tiny()["domains"][0], "environment": environment.replace("worlds", module), "environment_args": arguments}
    (directory / "run.yaml").write_text(yaml.safe_dump(tiny(domains=[one]), sort_keys=False))
    (directory / "cluster.yaml").write_text(
        yaml.safe_dump({**CLUSTER, "environments": {"workers": 0, **hosts}}, sort_keys=False)
    )
    return directory / "run.yaml", directory / "cluster.yaml"


def refused(run: Path, cluster: Path) -> pytest.ExceptionInfo[SpecError]:
    with pytest.raises(SpecError) as told:
        refuse_files(read_specs(run, cluster), SpecSources.files(run, cluster))
    return told


def line_of(path: Path, text: str) -> str:
    """`file:line` of the only line that contains the text."""
    (number,) = (n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return f"{path}:{number}:"


TOLD = [
    ("worlds:Whol", {}, "environment: worlds", r"has no 'Whol'; did you mean 'Whole'\?"),
    ("worlds:Whole", {"sise": 4}, "sise", r"environment_args has 'sise' .*did you mean 'size'\?"),
    ("worlds:Whole", {"size": 1}, " size: 1", r"cannot be made with \{'size': 1\}: ValueError: size 1 is too small"),
    ("worlds:Exits", {}, "environment: worlds", "it exited with 7"),
    ("worlds:Half", {}, "environment: worlds", r"makes Half without step, close \(rule: .*async reset\(seed\)"),
    ("no_such_worlds:Whole", {}, "environment: no_such", "there is no module 'no_such_"),
]


@pytest.mark.parametrize(("environment", "arguments", "line", "words"), TOLD)
def test_in_the_controller(tmp_path: Path, environment: str, arguments: dict[str, Any], line: str, words: str) -> None:
    run, cluster = written(tmp_path, environment, arguments)
    refusal = refused(run, cluster)
    assert refusal.value.where.startswith(line_of(run, line))
    refusal.match(words)
    assert str(tmp_path) not in sys.path


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "arguments", "line", "words"), TOLD)
def test_by_the_hosts_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, arguments: dict[str, Any], line: str, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run, cluster = written(tmp_path, environment, arguments, workers=1)
    refusal = refused(run, cluster)
    assert refusal.value.where.startswith(line_of(run, line))
    refusal.match(words)
    assert not any(name.startswith("worlds_of_test_by") for name in sys.modules), "this process has not imported it"


@pytest.mark.slow
def test_one_that_takes_the_interpreter_along_or_is_not_over_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run, cluster = written(tmp_path, "worlds:Dies", {}, workers=1)
    refused(run, cluster).match(r"environment of domain 'coin' was killed by SIGSEGV: Fatal Python error")
    run, cluster = written(tmp_path, "worlds:Hangs", {}, workers=1, start_s=3.0)
    refused(run, cluster).match(r"not over within 3 s \(environments.start_s\)")


@pytest.mark.slow
def test_what_an_environment_has_started_is_not_waited_for(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    run, cluster = written(tmp_path, "worlds:Serves", {"note": str(note)}, workers=1, start_s=60.0)
    try:
        refuse_files(read_specs(run, cluster), SpecSources.files(run, cluster))
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)  # it still runs, and holds the check's stdout and stderr


@pytest.mark.slow
def test_an_interpreter_that_is_none_or_lacks_rollart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run, cluster = written(tmp_path, "worlds:Whole", {}, workers=1, python="nowhere/python")
    missing = refused(run, cluster)
    assert missing.value.where.startswith(line_of(cluster, "python: nowhere"))
    missing.match("nowhere/python', which cannot be run: No such file or directory")
    import venv

    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    written(tmp_path, "worlds:Whole", {}, workers=1, python="bare/bin/python")
    bare = refused(run, cluster)
    bare.match("under which no host could run: .*No module named 'rollart'")
    assert bare.value.remedy == "pip install rollart into it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "line", "words"),
    [
        ({"images": "rollart.adapters.envs.images:TarImage"}, "images:", "did you mean 'TarImages'"),
        (
            {"images": "rollart.adapters.envs.images:TarImages", "images_args": {"stor": "a", "cache": "b"}},
            "stor:",
            "images_args has 'stor' .*did you mean 'store'",
        ),
        ({"images": "tests.contracts.worlds:Tale"}, "images:", "has no images and no ensure"),
    ],
)
def test_image_hooks_are_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Any], line: str, words: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run, cluster = written(tmp_path, "worlds:Whole", {}, workers=1, **hosts)
    refusal = refused(run, cluster)
    assert refusal.value.where.startswith(line_of(cluster, line))
    refusal.match(words)


def test_a_harness_is_looked_at_in_the_controller(tmp_path: Path) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {"size": 4})
    text = run.read_text().replace("environment: worlds", "environment: {harness: 'tests.proxy.agents:nobody'} # ")
    run.write_text(text)
    refusal = refused(run, cluster)
    assert refusal.value.where.startswith(line_of(run, "nobody"))
    refusal.match("has no 'nobody'")


@pytest.mark.parametrize("producer", ["raises", "number"])
def test_a_configuration_that_a_function_does_not_give_is_refused(tmp_path: Path, producer: str) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {"size": 4})
    (tmp_path / "made_here.py").write_text("def raises(): return {}['size']\ndef number(): return 5\n")
    spec = yaml.safe_load(run.read_text())
    spec["model"]["init"] = f"made_here:{producer}"
    run.write_text(yaml.safe_dump(spec, sort_keys=False))
    with pytest.raises(SpecError, match=f"model.init 'made_here:{producer}' (gives no configuration|returned int)"):
        refuse_files(read_specs(run, cluster))


def test_a_tokenizer_whose_function_fails_is_a_spec_error(tmp_path: Path) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {"size": 4})
    spec = yaml.safe_load(run.read_text())
    spec["model"]["tokenizer"] = "os:listdir"
    run.write_text(yaml.safe_dump(spec, sort_keys=False))
    with pytest.raises(SpecError, match=r"model.tokenizer 'os:listdir' failed: FileNotFoundError"):
        prepare_tokenizer(resolve_files(run, cluster, []), tmp_path / "run")


def test_a_tokenizer_that_was_not_written_whole_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {"size": 4})
    (tmp_path / "half.py").write_text(
        "broken = [OSError('No space left on device')]\n"
        "def write(directory):\n"
        "    directory.mkdir(parents=True)\n"
        "    (directory / 'tokenizer.json').write_text('half' if broken else 'whole')\n"
        "    for error in broken[:]:\n"
        "        broken.clear()\n"
        "        raise error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = yaml.safe_load(run.read_text())
    spec["model"]["tokenizer"] = "half:write"
    run.write_text(yaml.safe_dump(spec, sort_keys=False))
    resolved = resolve_files(run, cluster, [])
    with pytest.raises(SpecError, match="No space left on device"):
        prepare_tokenizer(resolved, tmp_path / "run")
    for _ in range(2):
        assert (prepare_tokenizer(resolved, tmp_path / "run") / "tokenizer.json").read_text() == "whole"


def test_other_machines_look_for_themselves(tmp_path: Path) -> None:
    run, cluster = written(tmp_path, "no_such_worlds:Whole", {}, workers=1)
    cluster.write_text(cluster.read_text() + "runtime: {backend: ray, address: 'head:6379'}\n")
    assert environment_problems(read_specs(run, cluster)) == []


def test_every_command_that_reads_a_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {"sise": 1})
    for arguments in (["validate", str(run)], ["launch", str(run), "--cluster", str(cluster), "--dry-run"]):
        assert rollart(arguments) == 2
        told = capsys.readouterr()
        assert f"rollart: {line_of(run, 'sise')}" in told.err
        assert "did you mean 'size'" in told.err
        assert told.out == ""
    runs = tmp_path / "runs"
    assert rollart(["launch", str(run), "--cluster", str(cluster), "--runs-dir", str(runs)]) == 2
    assert not runs.exists(), "nothing was made"


def test_more_ahead_than_are_played_or_kept_is_a_spec_error(tmp_path: Path) -> None:
    run, cluster = written(tmp_path, "worlds:Whole", {}, workers=1, per_worker=4, warm=5)
    with pytest.raises(
        SpecError, match=r"cluster.yaml:\d+:\d+: environments.warm is 5 \(rule: at most per_worker, 4\)"
    ):
        read_specs(run, cluster)
    written(tmp_path, "worlds:Whole", {}, workers=1, reuse=2)
    with pytest.raises(SpecError, match=r"environments.reuse is 2 with warm 0"):
        read_specs(run, cluster)


@pytest.mark.slow  # a check in another process, 1 s
@pytest.mark.parametrize(
    ("environment", "workers"),
    [
        ("worlds:Whole", "auto"),
        ("worlds:Quick", 0),
        ("rollart.adapters.envs.frozen_lake:FrozenLakeText", 0),
        ("rollart.adapters.envs.reasoning_gym:ReasoningGymEnv", 0),
    ],
)
def test_environments_live_on_hosts_unless_they_declare_themselves_quick(
    tmp_path: Path, environment: str, workers: int | str
) -> None:
    arguments = {"dataset": "chain_sum"} if "reasoning" in environment else {}
    run, cluster = written(tmp_path, environment, arguments, workers="unless_quick")
    assert decide_workers(resolve_files(run, cluster, [])).cluster.environments.workers == workers


def test_hosts_import_from_where_the_controller_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example from the directory of the launching script."""
    run, cluster = written(tmp_path, "worlds:Whole", {}, workers="unless_quick")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for module in tmp_path.glob("*.py"):
        module.rename(elsewhere / module.name)
    with pytest.raises(SpecError, match="there is no module"):
        decide_workers(resolve_files(run, cluster, []))
    monkeypatch.syspath_prepend(str(elsewhere))
    assert decide_workers(resolve_files(run, cluster, [])).cluster.environments.workers == "auto"


QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 2,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 128,
}


MOE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def weights() -> bytes:
    """The bytes of a safetensors file with one tensor."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        ({"model": {"path": "nowhere"}}, "path", "model.path is 'nowhere', and there is no directory"),
        ({"model": {"path": "no/such/model"}}, "path", "or the id OWNER/NAME of a model of the Hugging Face Hub"),
        ({"model": {"path": "gpt"}}, "path", "architecture GPT2LMHeadModel is not supported"),
        ({"model": {"path": "gpt"}}, "path", r"or engines: \{kind: vllm\}"),
        ({"model": {"path": "shared"}}, "path", "Qwen2MoeForCausalLM, which has shared experts, is not supported"),
        ({"model": {"path": "bare"}}, "path", "model.safetensors is missing"),
        ({"model": {"path": "cut"}}, "path", r"model.safetensors ends after \d+ of \d+ bytes"),
        ({"model": {"path": "whole", "tokenizer": "bare"}}, "tokenizer", "there is no tokenizer.json"),
        ({"model__init": {"model_type": "gpt2"}}, "model_type", "architecture gpt2 is not supported"),
        ({"model__init": "tests.e2e.worlds:nothing"}, "init", "has no attribute"),
        ({"model__tokenizer": "no_such:thing"}, "tokenizer", "model.tokenizer 'no_such:thing' cannot be imported"),
        ({"domains__0__chat": True}, "chat", "chat of domain 'coin': the model has no chat template"),
        ({"domains__0__chat": {"observations": "robot"}}, "observations", "observations is 'robot'"),
        (
            {"domains__0__chat": True, "domains__0__environment": {"harness": "tests.e2e.worlds:Coin"}},
            "chat",
            r"chat of domain 'coin' is given for a harness \(rule",
        ),
        ({"model": {"config": QWEN}}, "config", "model has neither 'path' nor 'init'"),
        ({"functions__0__source": "nowhere.py"}, "name: rule", "function 'rule'"),
        ({"functions__0__handler": "nobody"}, "name: rule", "function 'rule'"),
        ({"training": {"loss": {"clip_low": 0}}}, "clip_low", "clip_low is 0"),
        (
            {
                "domains__0__environment": "rollart.adapters.envs.reasoning_gym:ReasoningGymEnv",
                "domains__0__environment_args": {"dataset": "spell_bakward"},
            },
            "dataset",
            "has no data set 'spell_bakward'; did you mean 'spell_backward'?",
        ),
    ],
)
def test_no_command_accepts_a_run_that_no_launch_could_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], place: str, message: str
) -> None:
    shared = {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 16}
    gpt = {"architectures": ["GPT2LMHeadModel"]}
    for name, config in (("gpt", gpt), ("shared", shared), ("bare", QWEN), ("whole", QWEN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "whole" / "model.safetensors").write_bytes(weights())
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "cut" / "model.safetensors").write_bytes(weights()[:-1])
    run, cluster, runs = tmp_path / "run.yaml", tmp_path / "cluster.yaml", tmp_path / "runs"
    run.write_text(yaml.safe_dump(tiny(**changes), sort_keys=False))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    commands = [["launch", str(run), "--cluster", str(cluster), "--runs-dir", str(runs)]]
    commands += [[*commands[0], "--dry-run"], ["validate", str(run), str(cluster)]]
    for command in commands[: 2 if "config" in changes.get("model", {}) else 3]:  # a plan needs no weights
        assert rollart(command) == 2
        told = capsys.readouterr()
        assert re.search(message, told.err), told.err
        assert line_of(run, f"{place}:" if ":" not in place else place) in told.err
    assert not runs.exists(), "nothing was made"


HELPERS = """
def fails(*arguments): raise ValueError("no corpus")
def nothing(directory): pass
def three(): return 3
"""
REWARD = "def rule(sample) -> float:\n    return 1.0\n"
STATEFUL = "n = 0\ndef rule(sample{}) -> float:\n    global n\n    n += 1\n    return 1.0\n"
FILES = {
    "reward.py": REWARD,
    "lazy.py": "import no_such_module\n" + REWARD,
    "counts.py": STATEFUL.format(""),
    "inside.py": STATEFUL.format(", env"),
    "lost.py": "import no_such_module\n" + STATEFUL.format(""),
    "garbage/tokenizer.json": "{}",
    "small/config.json": '{"vocab_size": 7}',
}


@pytest.mark.parametrize(
    ("changes", "cluster_changes", "message"),
    [
        (
            {"training__loss": {"kl": 0.1, "reference": "nowhere"}},
            {},
            "reference is 'nowhere', whose config.json is not",
        ),
        ({"training__loss": {"kl": 0.1, "reference": "small"}}, {}, "reference is 'small' with vocab_size 7"),
        ({"model__tokenizer": "garbage"}, {}, "tokenizer.json is no tokenizer"),
        ({"model__tokenizer": "helpers:fails"}, {}, "helpers:fails' failed: ValueError: no corpus"),
        ({"model__tokenizer": "helpers:nothing"}, {}, "wrote no tokenizer.json"),
        ({"model__tokenizer": "helpers:three"}, {}, "takes 0 positional arguments"),
        ({"model__init": "helpers:fails"}, {}, "gives no configuration: ValueError: no corpus"),
        ({"model__init": "helpers:three"}, {}, "returned int"),
        ({"model__init": {"model_type": "qwen3"}}, {}, "hidden_size is None"),
        ({"model__init__num_attention_heads": 3}, {}, "num_attention_heads is 3 and num_key_value_heads 2"),
        ({"model__init__vocab_size": 8}, {}, "vocab_size 8, and the tokenizer"),
        ({"domains__0__stop": ["no-such-token"]}, {}, "'no-such-token' is"),
        pytest.param({"training__lora": {"rank": 2, "targets": ["no_proj"]}}, {}, "targets has 'no_proj'", marks=EXTRA),
        pytest.param(
            {"model__init": MOE, "training__lora": {"rank": 2, "targets": ["up_proj"]}},
            {},
            "targets has 'up_proj' (rule: all-linear, or linear modules: q_proj, k_proj, v_proj, o_proj)",
            marks=EXTRA,
        ),
        ({"functions__0__requirements": ["nosuchpackage==1.0"]}, {}, "requires nosuchpackage==1.0, which is not"),
        ({"functions__0__preload": ["no_such_module"]}, {}, "preloads no_such_module"),
        ({"functions__0__source": "lazy.py"}, {}, "imports no_such_module, which is neither packed nor installed"),
        ({"functions__0__artefact": "nowhere.bin"}, {}, "artefact of function 'rule': there is no"),
        ({"functions__0__artefact": "no_such:train"}, {}, "there is no module 'no_such'"),
        ({"functions__0__source": "counts.py", "functions__0__trust": "untrusted"}, {}, "it is untrusted"),
        ({"functions__0__source": "inside.py"}, {}, "takes an environment"),
        ({"functions__0__source": "lost.py"}, {}, "cannot be imported: ModuleNotFoundError"),
        ({"placement": {"profile": "nowhere"}}, {}, "is no run's directory"),
        ({}, {"pools__0__count": 1}, "cannot hold the run"),
        ({}, {"engines__count": 4}, "cannot hold the run"),
        ({}, {"engines": {"max_slots": 16}}, "no plan: no pool can serve"),
        ({}, {"pools__0__device": "NoSuchGPU"}, "'NoSuchGPU' has no price"),
        ({}, {"pools__0__device": "L4"}, "engine-0 on pool 'here' computes on a GPU, and the torch"),
        ({"training__routing_replay": True}, {"engines__kind": "vllm"}, "training.routing_replay is true"),
        pytest.param(
            {"training__lora": {}, "domains__0__adapter": "games"},
            {"engines__kind": "vllm"},
            "domain 'coin' has the adapter 'games' (rule: with embedded engines and the embedded trainer)",
            marks=EXTRA,
        ),
        (
            {"deterministic": True, "schedule": "sync", "staleness": 0},
            {"engines__kind": "vllm"},
            "deterministic is true (rule: with embedded",
        ),
        ({"training__stream": True}, {"trainer__ranks": 1, "trainer__dtype": "bfloat16"}, "training.stream is true"),
        pytest.param(
            {"rollout": {"parallelism": {}}},
            {"runtime": {"backend": "ray", "elastic": {}}},
            "one of them starts",
            marks=EXTRA,
        ),
        ({"weights": {"collective": {"backend": "nccl"}}}, {}, "collective.backend is nccl"),
        (
            {"schedule": "sync_plus", "staleness": 0, "training__stream": True, "rollout": {"lending": {}}},
            {},
            "the embedded trainer takes no other devices",
        ),
        (
            {},
            {"functions": {"backend": "http", "http": {"rule": {"url": "http://h", "token_env": "NO_SUCH"}}}},
            "NO_SUCH is not set",
        ),
        (
            {},
            {"functions": {"backend": ["http", "local"], "http": {"other": "http://h"}}},
            "no URL for function 'rule'",
        ),
        ({}, {"functions": {"backend": "modal"}}, "modal is not installed"),
        ({}, {"functions": {"backend": "aws_lambda"}}, "boto3 is not installed"),
        ({"training__lora": {"rank": 2}}, {}, "peft is not installed"),
        pytest.param(
            {}, {"runtime": {"backend": "ray", "address": "h:1", "token": "nowhere"}}, "which is no file", marks=EXTRA
        ),
        ({}, {"engines": {"kind": "vllm", "count": 1}}, "nor is ROLLART_VLLM_PYTHON"),
        ({}, {"engines": {"kind": "vllm", "count": 1, "vllm": {"python": "/nowhere"}}}, "/nowhere cannot be run"),
        ({}, {"trainer__external": "0.0.0.0:0", "trainer__external_token": "env:NO_SUCH"}, "NO_SUCH is not set"),
        ({}, {"trainer__external": "203.0.113.7:80", "trainer__external_token": "file"}, "no server can listen on"),
    ],
)
def test_every_command_gives_the_answer_of_a_launch(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    cluster_changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.delenv("ROLLART_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name, had=importlib.metadata.version: "2.13.0+cpu" if name == "torch" else had(name),
    )
    missing = {message.partition(" ")[0]} if "is not installed" in message else set()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    helpers = f"helpers_of_{tmp_path.name}".replace("-", "_")  # modules are cached by name
    (tmp_path / f"{helpers}.py").write_text(HELPERS)
    run, cluster, runs = tmp_path / "run.yaml", tmp_path / "cluster.yaml", tmp_path / "runs"
    run.write_text(yaml.safe_dump(tiny(**changes), sort_keys=False).replace("helpers:", f"{helpers}:"))
    cluster.write_text(yaml.safe_dump(changed(CLUSTER, **cluster_changes)))
    launch = ["launch", str(run), "--cluster", str(cluster), "--runs-dir", str(runs)]
    answers = [
        (rollart(command), capsys.readouterr())
        for command in (launch, [*launch, "--dry-run"], ["validate", str(run), str(cluster)])
    ]
    (code, told), *others = answers
    assert message.replace("helpers", helpers) in told.err
    assert "Traceback" not in told.err
    assert "unexpected" not in told.err
    assert code in (2, 3)
    assert [(code, told.err)] * 2 == [(code, told.err) for code, told in others]
    assert not runs.exists(), "nothing was made"


def test_nothing_else_refuses_a_run_on_the_way_to_its_first_part() -> None:
    for module in ("rollart.cli.launch", "rollart.launch.launch", "rollart.launch.wiring"):
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        calls = [
            node.func for node in ast.walk(ast.parse(Path(found.origin).read_text())) if isinstance(node, ast.Call)
        ]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert {name for name in names if name.startswith("refuse_") or name == "ready"} <= {
            "refuse_unlaunchable",
            "refuse_changed",
        }


@EXTRA
def test_what_only_other_machines_can_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "runtime": {"backend": "ray", "address": "head:6379"},
        "functions": {"backend": "modal"},
        "engines": {"kind": "vllm", "count": 1, "attach": ["http://gpu:8000"]},
    }
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(), sort_keys=False))
    cluster.write_text(yaml.safe_dump({**CLUSTER, **changes}))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    warned = capsys.readouterr().err
    assert rollart(["launch", str(run), "--cluster", str(cluster), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in ("a Ray cluster answers at head:6379", "http://gpu:8000 serves the model", "modal answers"):
        assert f"{run}: not checked: whether {text}" in warned
        assert f"# not checked: whether {text}" in shown


def test_a_dry_run_looks_at_the_directory_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    (runs / "taken").mkdir(parents=True)
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--runs-dir", str(runs), "--name", "taken"], "run 'taken' exists"),
        (["--runs-dir", str(tmp_path / "file")], "cannot be written"),
        (["--runs-dir", str(runs), "--resume", "nothing"], "no run 'nothing'"),
    ):
        answers = [(rollart(["launch", *arguments, *dry]), capsys.readouterr()) for dry in ([], ["--dry-run"])]
        assert message in answers[0][1].err
        assert answers[0] == answers[1]
    assert [path.name for path in runs.iterdir()] == ["taken"]


def test_the_check_loads_no_torch(tmp_path: Path) -> None:
    code = "import sys; from rollart.cli.main import run; assert run(sys.argv[1:]) == 0; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(builtin("runs/quickstart.yaml"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


"""Needs an extra, such as Ray, that is installed for the slow tests."""

PACKED_REWARD = """
import os
def rule(sample) -> float:
    import numpy
    import no_such_module
    return float(len(os.environ["JUDGE_KEY"]) + os.getenv("MODEL", 0) + numpy.sum([]))
"""


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        pytest.param(
            "modal",
            [
                "reward.py:5: imports no_such_module, which is neither packed nor in its requirements",
                "reward.py:4: imports numpy, which is neither",
                "it reads the environment variable JUDGE_KEY",
                "it reads the environment variable MODEL",
            ],
            marks=EXTRA,
        ),
        pytest.param("aws_lambda", ["torch is larger than the 250 MB that AWS Lambda unpacks"], marks=EXTRA),
        ("local", ["it reads the environment variable JUDGE_KEY", "it reads the environment variable MODEL"]),
        ("http", []),
    ],
)
def test_a_function_that_will_not_work_at_its_provider(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, wanted: list[str]
) -> None:
    (tmp_path / "reward.py").write_text(PACKED_REWARD)
    function = {"name": "rule", "source": "reward.py", "handler": "rule", "requirements": ["torch==2.6.0+cpu"]}
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(functions=[function])))
    http = {"rule": "http://127.0.0.1:1/rule"}
    cluster.write_text(yaml.safe_dump(CLUSTER | {"functions": {"backend": backend, "http": http}}))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    warned = capsys.readouterr().err
    assert rollart(["launch", str(run), "--cluster", str(cluster), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in wanted:
        assert f"{run}: warning: function 'rule': {text}" in warned
        assert f"# warning: function 'rule': {text}" in shown
    assert wanted or "reads the environment variable" not in warned


def test_rewards_that_run_beside_the_environments_or_without_their_gpu_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counts.py").write_text("n = 0\n\ndef counts(sample):\n    global n\n    n += 1\n    return float(n)\n")
    (tmp_path / "model.py").write_text(
        "import os\n\ndef model(sample):\n    return float(len(os.environ['LAMBDA_TASK_ROOT']))\n"
    )
    functions = [
        {"name": "counts", "source": "counts.py", "handler": "counts"},
        {"name": "model", "source": "model.py", "handler": "model", "gpu": "L4"},
    ]
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(functions=functions, domains__0__rewards=[{"function": "counts"}])))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    warned = capsys.readouterr().err
    assert "function 'counts' depends on earlier calls, so it runs beside the environments: " in warned
    assert "counts.py:" in warned
    assert "function 'model': it asks for a GPU (L4)" in warned
    assert "LAMBDA_TASK_ROOT" not in warned, "the runtime sets it, and a spec cannot"


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        pytest.param({"runtime": {"backend": "ray", "address": "head:6379"}}, True, marks=EXTRA),
        ({"engines": {"kind": "vllm", "count": 1, "attach": ["http://gpu:8000"]}}, True),
        ({}, False),
    ],
)
def test_ports_without_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], warned: bool
) -> None:
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny()))
    cluster.write_text(yaml.safe_dump(CLUSTER | changes))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert ("answer HTTP without a token" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("steps", "warned"), [(199, False), (200, True)])
def test_a_long_run_that_keeps_two_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, warned: bool
) -> None:
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(steps=steps)))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert (f"of {steps} versions the last 2 are kept" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("version", "required", "warned"),
    [
        ("2.13.0", ["nvidia-cublas-cu12==12.8"], True),
        ("2.13.0+cu128", [], True),
        ("2.13.0+cpu", [], False),
        ("2.13.0", [], False),
    ],
)
def test_cuda_packages_that_no_part_uses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    required: list[str],
    warned: bool,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny()))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert ("torch is installed with gigabytes of CUDA packages" in capsys.readouterr().err) == warned


def test_a_shipped_spec_that_is_not_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rollart(["validate", "configs/clusters/local.yaml"]) == 2
    assert "the one that rollart brings is " in capsys.readouterr().err


def test_a_template_that_drops_thoughts_is_warned_of(tmp_path: Path) -> None:
    content = "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}"
    directory = write_tokenizer(tmp_path / "tokenizer").parent
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(tiny(model__tokenizer="tokenizer", domains__0__chat=True)))
    found = []
    for shown in ("{{ m.content }}", content):
        (directory / "chat_template.jinja").write_text(f"{{% for m in messages %}}{shown} <eos> {{% endfor %}}")
        found.append([one for one in launch_warnings(read_specs(run)) if "leaves thoughts" in one])
    assert [len(one) for one in found] == [0, 1]
    assert "domain 'coin'" in found[1][0]


def test_switches_that_differ_from_those_of_the_algorithm_are_warned_of(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    loss = {"clip_low": 0.2, "clip_high": 4e-4}
    run.write_text(yaml.safe_dump(tiny(domains__0__group_size=2, training={"algorithm": "gspo", "loss": loss})))
    found = [one for one in launch_warnings(read_specs(run)) if "training.algorithm" in one]
    assert found == ["training.loss.clip_low is 0.2, given beside training.algorithm 'gspo', whose own is 0.0003"]
