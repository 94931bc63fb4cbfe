"""`rollart rewards`: a reward's life on this machine, and how it fails elsewhere."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rollart.cli.commands import cli
from rollart.errors import RollartError, StorageFailed
from rollart.launch.functions import translated_errors
from serverless.errors import BackendFailed, FunctionFailed, ServerlessError, SpecInvalid
from tests.serverless.aws import provider as aws

Call = Callable[..., Any]

ITEM = {"messages": [{"role": "assistant", "content": "<answer>42</answer>"}], "reference_answer": "42"}
ITEM_TEXT = json.dumps(ITEM)


def rows(text: str, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["tables"][table]
    return found


@pytest.mark.slow  # function workers are processes
def test_the_life_of_a_reward(rollart: Call) -> None:
    written = rollart("rewards", "init", "mine")
    assert written.code == 0
    assert "rollart rewards test mine/mine.py" in written.err
    tried = rollart("rewards", "test", "mine/mine.py", "-o", "json")
    assert tried.code == 0, tried.err
    (report,) = json.loads(tried.out)["rewards"]
    assert report["passed"] is True
    assert {c["provider"] for c in report["costs"]} >= {"aws_lambda", "modal"}

    (change,) = rows(rollart("rewards", "deploy", "mine/mine.py", "--dry-run", "-o", "json").out, "changes")
    assert "create" in change["change"]
    assert rows(rollart("rewards", "list", "-o", "json").out, "functions") == []
    (first,) = rows(rollart("rewards", "deploy", "mine/mine.py", "-o", "json").out, "functions")
    (again,) = rows(rollart("rewards", "deploy", "mine/mine.py", "--dry-run", "-o", "json").out, "changes")
    assert "nothing" in again["change"]
    assert "mine: unchanged: version" in rollart("rewards", "deploy", "mine/mine.py").out

    source = Path("mine/mine.py")
    source.write_text(source.read_text().replace("timeout_s=5", "timeout_s=6"))
    (second,) = rows(rollart("rewards", "deploy", "mine/mine.py", "-o", "json").out, "functions")
    assert second["version"] != first["version"]
    assert [v["version"] for v in rows(rollart("rewards", "versions", "mine", "-o", "json").out, "functions")] == [
        second["version"],
        first["version"],
    ]
    (back,) = rows(rollart("rewards", "rollback", "mine", "-o", "json").out, "functions")
    assert back["version"] == first["version"]
    (scaled,) = rows(rollart("rewards", "scale", "mine", "--warm", "2", "-o", "json").out, "functions")
    assert scaled["warm"] == 2

    for named in ("mine/mine.py", "mine"):
        called = rollart("rewards", "invoke", named, "--item", json.dumps(ITEM))
        assert called.code == 0
    assert json.loads(called.out)[0]["aggregate_reward_score"] == 1.0
    assert "billed" in called.err
    assert rollart("rewards", "delete", "mine", "--yes").code == 0
    assert rows(rollart("rewards", "list", "-o", "json").out, "functions") == []


@pytest.mark.slow  # function workers are processes
def test_the_life_of_a_canary(rollart: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(value: float | str) -> None:
        Path("f.py").write_text(f"from rollart import reward\n\n@reward\ndef f(sample):\n    return {value}\n")

    def scored(name: str) -> float:
        done = rollart("rewards", "invoke", name, "--item", ITEM_TEXT)
        assert done.code == 0, done.err
        return float(json.loads(done.out)[0]["aggregate_reward_score"])

    write(1.0)
    assert rollart("rewards", "diff", "f.py", "--exit-code").code == 1, "it is to be created"
    assert rollart("rewards", "deploy", "f.py").code == 0
    same = rollart("rewards", "diff", "f.py", "--exit-code")
    assert (same.code, "nothing: unchanged" in same.out) == (0, True)

    write(2.0)
    Path("cases.jsonl").write_text(json.dumps(ITEM) + "\n")
    found = rollart("rewards", "diff", "f.py", "--canary", "0.2")
    assert found.code == 0, found.err
    assert "-    return 1.0\n+    return 2.0\n" in found.out
    assert "canary: none -> " in found.out
    machine = rollart("rewards", "diff", "f.py", "-o", "json").out
    (file,) = rows(machine, "files")
    assert (file["file"], file["added"], file["removed"]) == ("function/f.py", 1, 1)
    costs = {row["provider"]: row for row in rows(machine, "costs")}
    assert costs["aws_lambda"]["before"] > 0.0
    assert costs["aws_lambda"]["after"] > 0.0
    assert "function/f.py: changed (+1 -1)" in rollart("rewards", "deploy", "f.py", "--dry-run").out

    assert rollart("rewards", "deploy", "f.py", "--canary", "0.2").code == 0
    listed = [(row["number"], row["weight"]) for row in rows(rollart("rewards", "list", "--json").out, "functions")]
    assert listed == [("1", 0.8), ("2", 0.2)]
    assert (scored("f@1"), scored("f@2"), scored("f@canary")) == (1.0, 2.0, 2.0)
    assert scored("f") in (1.0, 2.0)
    missing = rollart("rewards", "invoke", "f@3", "--item", ITEM_TEXT)
    assert (missing.code, "has no version '3'" in missing.err) == (2, True)
    assert json.loads(rollart("rewards", "invoke", "f@2", "--item", ITEM_TEXT, "--json").out)["number"] == "2"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "nobody answers" in rollart("rewards", "promote", "f").err
    compared = rollart("rewards", "promote", "f", "--cases", "cases.jsonl", "-y", "-o", "json")
    assert compared.code == 0, compared.err
    old, new = rows(compared.out, "comparison")
    assert (old["version"], old["score"], new["version"], new["score"]) == ("current", 1.0, "canary", 2.0)
    assert (old["items"], old["usd_per_million"] > 0.0, new["p50_ms"] > 0.0) == (1, True, True)
    assert rows(compared.out, "functions")[0]["weight"] == 1.0
    assert scored("f") == 2.0

    write(3.0)
    assert rollart("rewards", "deploy", "f.py", "--canary", "0.5").code == 0
    assert rollart("rewards", "rollback", "f").code == 0
    assert scored("f") == 2.0
    none = rollart("rewards", "promote", "f")
    assert (none.code, "f has no canary" in none.err) == (2, True)


@pytest.mark.slow  # function workers are processes
def test_a_canary_that_scores_no_case_is_not_promoted(rollart: Call) -> None:
    def deploy(value: str, *options: str) -> None:
        Path("f.py").write_text(f"from rollart import reward\n\n@reward\ndef f(sample):\n    return {value}\n")
        assert rollart("rewards", "deploy", "f.py", *options).code == 0

    deploy("1.0")
    deploy("1.0 / (sample is None)", "--canary", "0.5")
    Path("cases.jsonl").write_text((json.dumps(ITEM) + "\n") * 6)
    refused = rollart("rewards", "promote", "f", "--cases", "cases.jsonl", "-y")
    assert (refused.code, "more faults than the current version" in refused.err) == (5, True)
    assert "the canary scored none of 6 cases" in refused.out
    assert "no scores are recorded" not in refused.out
    refused = rollart("rewards", "promote", "f", "--cases", "cases.jsonl", "-y", "-o", "json")
    assert rows(refused.out, "comparison")[1]["crash_faults"] == 1.0


@pytest.mark.slow  # function workers are processes
def test_a_canary_that_was_not_compared_is_not_promoted(rollart: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def deploy(value: float, *options: str) -> None:
        Path("f.py").write_text(f"from rollart import reward\n\n@reward\ndef f(sample):\n    return {value}\n")
        assert rollart("rewards", "deploy", "f.py", *options).code == 0

    def another_is_deployed(*_: str) -> bool:
        deploy(3.0, "--canary", "0.5")
        return True

    deploy(1.0)
    deploy(2.0, "--canary", "0.5")
    monkeypatch.setattr("rollart.cli.rewards.release.confirmed", another_is_deployed)
    done = rollart("rewards", "promote", "f")
    assert done.code == 2, done.err
    assert "version 2 of f was compared, and now the canary is version 3" in done.err
    listed = [(row["number"], row["weight"]) for row in rows(rollart("rewards", "list", "--json").out, "functions")]
    assert listed == [("1", 0.5), ("3", 0.5)]


@pytest.mark.slow  # the real clients of AWS against its plane, real workers
@pytest.mark.skipif(bool(aws.MISSING), reason=f"not installed: {aws.MISSING}")
def test_a_call_of_a_file_leaves_what_is_current_and_a_name_calls_it(rollart: Call) -> None:
    with aws.plane() as plane:
        settings = {"region": aws.REGION, "endpoint_url": plane.url, "runtime": aws.settings(plane).runtime}
        text = f"name: c\npools: [{{name: p, count: 2}}]\nfunctions: {json.dumps({'aws_lambda': settings})}\n"
        Path("cluster.yaml").write_text(text)
        at = ("--provider", "aws", "--cluster", "cluster.yaml")

        def value(one: str) -> float:
            done = rollart("rewards", "invoke", one, "--item", ITEM_TEXT, *at)
            assert done.code == 0, done.err
            return float(json.loads(done.out)[0]["aggregate_reward_score"])

        def write(number: float, more: str = "") -> None:
            Path("f.py").write_text(
                f"from rollart import reward\n@reward({more})\ndef f(sample):\n    return {number}\n"
            )

        write(1.0)
        assert rollart("rewards", "deploy", "f.py", *at).code == 0
        (listed,) = rows(rollart("rewards", "list", *at, "--json").out, "functions")
        assert (listed["warm"], listed["most"]) == (0, None), "no concurrency is reserved"
        assert rollart("rewards", "scale", "f", "--concurrency", "5", *at).code == 0
        (listed,) = rows(rollart("rewards", "list", *at, "--json").out, "functions")
        assert listed["most"] == 5
        write(2.0)
        assert rollart("rewards", "deploy", "f.py", *at).code == 0
        assert rollart("rewards", "rollback", "f", *at).code == 0
        write(3.0, "warm=1")
        assert (value("f"), value("f.py"), value("f"), value("f.py")) == (1.0, 3.0, 1.0, 3.0)
        assert [one["Name"] for one in aws.client(plane).list_aliases(FunctionName="rollart-f")["Aliases"]] == ["live"]
        assert not any("provisioned" in call for call in plane.calls if call.startswith("PUT"))
        missing = rollart("rewards", "invoke", "nothing", "--item", ITEM_TEXT, *at)
        assert missing.code == 2
        assert "nothing is not deployed on AWS" in missing.err


@pytest.mark.slow  # function workers are processes
def test_a_case_that_is_not_as_expected_fails_the_command(rollart: Call) -> None:
    rollart("rewards", "init", "mine")
    Path("mine/cases.jsonl").write_text(json.dumps({**ITEM, "expected": {"score": 0.0}}) + "\n")
    done = rollart("rewards", "test", "mine/mine.py")
    assert done.code == 1
    assert "1, expected 0" in done.out
    assert "1 of 1 cases are not as expected" in done.err


UNTRUSTED = """from rollart import reward


@reward(trust="untrusted")
def runs(sample):
    scope = {}
    exec(sample.completion, scope)
    return float(scope["x"])
"""


@pytest.mark.slow  # function workers are processes
def test_untrusted_code_runs_in_a_sandbox_or_not_at_all(rollart: Call) -> None:
    Path("runs.py").write_text(UNTRUSTED)
    Path("cases.jsonl").write_text(json.dumps({"completion": "x = 1", "expected": {"score": 1.0}}) + "\n")
    refused = rollart("rewards", "test", "runs.py")
    assert refused.code == 3
    assert "never uses the sandbox" in refused.err
    assert rollart("rewards", "test", "runs.py", "--allow-unsafe").code == 0


@pytest.mark.slow  # function workers are processes
def test_a_plan_compares_providers(rollart: Call) -> None:
    rollart("rewards", "init", "mine")
    done = rollart(
        "rewards", "plan", "mine/mine.py", "--items", "1000000", "--runs-per-month", "3", "--from", "aws", "-o", "json"
    )
    assert done.code == 0, done.err
    found = {row["provider"]: row for row in rows(done.out, "plan")}
    assert found["aws_lambda"]["usd_per_month"] == pytest.approx(3 * found["aws_lambda"]["usd_per_run"])
    assert found["aws_lambda"]["month_against_now"] == pytest.approx(0.0)
    idle = found["modal"]["usd_per_run"] - found["modal"]["usd_per_million"]
    assert idle > 60 * 0.125 * 1e-5, "a container waits for a minute after its last call"
    assert "for each 60 s that a container waits" in found["modal"]["note"]
    assert found["modal"]["month_against_now"] == pytest.approx(
        found["modal"]["usd_per_month"] - found["aws_lambda"]["usd_per_month"]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("test", "nowhere.py"), 2, "nowhere.py"),
        (("deploy", "empty.py"), 2, "no function with @reward"),
        (("deploy", "wrong.py"), 2, "memory_mb"),
        (("deploy", "two.py", "--name", "x"), 2, "2 rewards"),
        (("invoke", "two@", "--item", ITEM_TEXT), 2, "give a version after @"),
        (("serve", "two@"), 2, "'two@' has no version (rule: NAME or NAME@VERSION)"),
        (("list", "--provider", "azure"), 2, "no provider 'azure'"),
        (("list", "--provider", "http"), 2, "nothing is deployed to 'http'"),
        (("scale", "f"), 2, "nothing to scale"),
        (("versions", "f"), 2, "f"),
        (("invoke", "two.py:a", "--item", "{"), 2, "not JSON"),
        (("list", "--provider", "aws", "--cluster", "nonsense.yaml"), 2, "nonsense.yaml:3:40: functions.aws_lambda"),
        (("list", "--provider", "aw"), 2, "did you mean 'aws'?"),
        (("list", "--root", "empty.py"), 1, "empty.py: File exists"),
        (("list", "--json", "-o", "csv"), 2, "--json and -o csv"),
        (("deploy", "argument.py"), 2, "argument.py:3: @reward has no argument 'memory'; did you mean 'memory_mb'?"),
        (("deploy", "latin.py"), 2, "latin.py: not UTF-8 text (byte 2)"),
        (("deploy", "syntax.py"), 2, "syntax.py:1: not Python"),
        (("deploy", "two.py:a", "--name", "a b"), 2, "'a b' cannot name a function"),
        (("deploy", "two.py:c"), 2, "its definition is not in the source"),
        (("deploy", "two.py:c"), 2, "name one that the file defines"),
        (("test", "."), 2, ".: a directory without __init__.py"),
        (("invoke", "two.py:a", "--item", " "), 2, "no item"),
        (("test", "two.py", "--cases", "nowhere.jsonl"), 2, "nowhere.jsonl: No such file"),
        (("test", "two.py", "--cases", "bytes.jsonl"), 2, "bytes.jsonl: not UTF-8 text (byte 0)"),
        (("test", "two.py", "--cases", "key.jsonl"), 2, "key.jsonl:2: unknown key 'expcted'"),
        (("test", "two.py", "--cases", "fault.jsonl"), 2, "fault.jsonl:1: expected.fault: 'nothing' (rule: one of"),
        (("serve", "two.py", "--host", "0.0.0.0"), 2, "with a token"),
        (("serve", "two.py", "--token-env", "NO_SUCH_TOKEN"), 3, "NO_SUCH_TOKEN is not set"),
        (("serve", "nowhere.py"), 2, "nowhere.py"),
        (("delete", "f", "--provider", "azure"), 2, "no provider 'azure'"),
        (("logs", "f", "-f", "-o", "csv"), 2, "-f with -o csv (rule: table, or json"),
        (("dev", "two.py", "-o", "html"), 2, "-o html (rule: table, or json"),
        (("dev", "."), 2, ".: a directory without __init__.py"),
        (("dev", "/"), 2, "/: a directory without __init__.py"),
        (("dev", ""), 2, "'': a directory without __init__.py"),
        (("dev", "syntax.py"), 2, "syntax.py:1: not Python"),
        (("doctor", "two.py", "--cases", "nowhere.jsonl"), 2, "nowhere.jsonl: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(rollart: Call, arguments: tuple[str, ...], code: int, word: str) -> None:
    Path("empty.py").write_text("X = 1\n")
    Path("wrong.py").write_text("from rollart import reward\n\n@reward(memory_mb=1)\ndef f(s): return 1.0\n")
    Path("two.py").write_text(
        "from rollart import reward\n\n@reward\ndef a(s): return 1.0\n\n@reward\ndef b(s): return 1.0\n"
    )
    Path("nonsense.yaml").write_text(
        "name: c\npools: [{name: p, device: cpu, count: 1}]\nfunctions: {aws_lambda: {architecture: mips}}\n"
    )
    Path("argument.py").write_text("from rollart import reward\n\n@reward(memory=4)\ndef f(s): return 1.0\n")
    Path("latin.py").write_bytes(b"# \xff\n")
    Path("syntax.py").write_text("def f(:\n")
    Path("bytes.jsonl").write_bytes(b"\xff\n")
    Path("key.jsonl").write_text('{"completion": "x"}\n{"completion": "x", "expcted": 1}\n')
    Path("fault.jsonl").write_text('{"completion": "x", "expected": {"fault": "nothing"}}\n')
    done = rollart("rewards", *arguments)
    assert done.code == code, done.err
    assert word in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("command", "called"), [("diff", "release.rehearse"), ("doctor", "develop.rehearse_faults")])
def test_costs_are_at_the_prices_of_the_cluster(
    rollart: Call, monkeypatch: pytest.MonkeyPatch, command: str, called: str
) -> None:
    prices: list[Any] = []

    async def rehearsed(*_: object, **given: Any) -> None:
        prices.append(given["prices"])
        raise SpecInvalid("enough is known")

    monkeypatch.setattr(f"rollart.cli.rewards.{called}", rehearsed)
    Path("f.py").write_text("from rollart import reward\n\n@reward\ndef f(sample): return 1.0\n")
    Path("cases.jsonl").write_text(ITEM_TEXT + "\n")
    price = {"name": "local", "unit": "core-second", "usd": 7.5, "source": "me", "date": "2026-01-01"}
    Path("cluster.yaml").write_text(
        json.dumps({"name": "c", "pools": [{"name": "p", "count": 2}], "price_list": [price]})
    )
    rollart("rewards", command, "f.py", "--cluster", "cluster.yaml", "--provider", "local")
    (found,) = prices
    assert (found["local"] if command == "diff" else found)["core-second"] == 7.5


def test_a_full_disk_is_named() -> None:
    with pytest.raises(StorageFailed, match="No space left on device"), translated_errors():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a file's write raises it, without its name


@pytest.mark.parametrize(
    ("error", "code"),
    [(FunctionFailed("it did not load"), 2), (BackendFailed("it is gone"), 3), (SpecInvalid("no"), 2)],
)
def test_the_exit_code_says_who_can_repair_it(error: ServerlessError, code: int) -> None:
    with pytest.raises(RollartError) as raised, translated_errors():
        raise error
    assert raised.value.exit_code == code


@pytest.mark.slow  # a trial in a real worker
def test_a_function_that_does_not_load_is_the_users_error(rollart: Call) -> None:
    Path("f.py").write_text("import rollart\nraise OSError('no data')\n\n@rollart.reward\ndef f(sample): return 1.0\n")
    result = rollart("rewards", "deploy", "f.py")
    assert result.code == 2, result
    assert "nothing is deployed" in result.err


COMMANDS = (
    ("list",),
    ("versions", "f"),
    ("logs", "f"),
    ("scale", "f", "--warm", "1"),
    ("rollback", "f"),
    ("delete", "f", "--yes"),
    ("deploy", "f.py"),
    ("deploy", "f.py", "--dry-run"),
    ("invoke", "f.py", "--item", ITEM_TEXT),
)
"""Those that ask a provider."""


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment and a home without credentials of anybody."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "MODAL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "none")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "modal.toml"))
    (tmp_path / "f.py").write_text("from rollart import reward\n\n@reward\ndef f(sample): return 1.0\n")
    return monkeypatch


@pytest.mark.slow  # loads the provider's library
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_credentials_of_aws_the_remedy_is_named(
    rollart: Call, nobody: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    pytest.importorskip("boto3")
    pytest.importorskip("aiobotocore")
    if command == COMMANDS[0]:  # each asks for the region first
        done = rollart("rewards", *command, "--provider", "aws")
        assert (done.code, done.out) == (3, "")
        assert "AWS_REGION" in done.err
    nobody.setenv("AWS_REGION", "us-east-1")
    done = rollart("rewards", *command, "--provider", "aws")
    assert (done.code, done.out) == (3, "")
    assert "AWS_ACCESS_KEY_ID" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow  # loads the provider's library
def test_without_credentials_of_modal_the_remedy_is_named(tmp_path: Path, nobody: pytest.MonkeyPatch) -> None:
    """In a process of its own: modal reads its configuration once, when it is imported."""
    pytest.importorskip("modal")
    code = (
        "import json, sys; from rollart.cli.main import run\n"
        "print([run(['rewards', *command, '--provider', 'modal']) for command in json.loads(sys.argv[1])])"
    )
    given = [sys.executable, "-c", code, json.dumps(COMMANDS)]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str([3] * len(COMMANDS)), done.stderr
    assert done.stderr.count("MODAL_TOKEN_ID") == len(COMMANDS)


@pytest.mark.slow  # function workers are processes
def test_a_deployment_tells_warnings_and_what_its_trial_cost(rollart: Call) -> None:
    Path("f.py").write_text(
        "import random\nfrom rollart import reward\n\n@reward(memory_mb=256)\ndef f(sample): return random.random()\n"
    )
    for arguments in (("deploy", "f.py", "--dry-run"), ("deploy", "f.py"), ("deploy", "f.py", "--json")):
        done = rollart("rewards", *arguments)
        assert done.code == 0, done.err
        assert "not seeded by the item" in done.out
    rollart("rewards", "delete", "f", "--yes")
    (bill,) = rows(rollart("rewards", "deploy", "f.py", "--json").out, "trials")
    assert (bill["status"], bill["MB"]) == ("ok", 256)
    assert bill["usd"] == pytest.approx(bill["billed_s"] * 0.25 * 0.0000166667 + 0.20 / 1e6)
    rollart("rewards", "delete", "f", "--yes")
    told = rollart("rewards", "deploy", "f.py").out
    assert "f: trial of " in told
    assert " s at 256 MB: no bill here, $" in told
    assert " / 1M elsewhere" in told


@pytest.mark.slow  # function workers are processes
def test_what_was_deployed_before_a_failure_is_told(rollart: Call) -> None:
    Path("two.py").write_text(
        "from rollart import reward\n\n@reward\ndef a(s): return 1.0\n\n"
        "@reward\nclass B:\n    def load(self, artefacts): raise ValueError('no weights')\n"
        "    def __call__(self, s): return 1.0\n"
    )
    done = rollart("rewards", "deploy", "two.py", "--json")
    assert done.code == 2
    assert [row["function"] for row in rows(done.out, "functions")] == ["a"]
    assert [row["status"] for row in rows(done.out, "trials")] == ["ok", "crash"]
    assert "no weights" in done.err


@pytest.mark.slow  # function workers are processes
def test_a_lower_limit_of_the_user_stays(tmp_path: Path) -> None:
    """Of the size of files: a worker may not raise it to its own, and works all the same."""
    (tmp_path / "f.py").write_text("from rollart import reward\n\n@reward\ndef mine(s): return 1.0\n")
    rollart = f'"{sys.executable}" -m rollart.cli.main'
    command = f"ulimit -f 1000; exec {rollart} rewards invoke f.py --item '{ITEM_TEXT}'"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # function workers are processes
def test_machines_get_json(rollart: Call) -> None:
    assert json.loads(rollart("rewards", "init", "mine", "--json").out)["files"][0] == "mine/mine.py"
    source = Path("mine/mine.py")
    more = '    print("\\033[31mred")\n    if not sample.completion:\n        raise TypeError("no text")\n    marks ='
    source.write_text(source.read_text().replace("    marks =", more, 1))
    called = rollart("rewards", "invoke", "mine/mine.py", "--json", "--item", json.dumps(ITEM))
    found = json.loads(called.out)
    assert found["answer"][0]["aggregate_reward_score"] == 1.0
    assert found["bill"]["memory_mb"] == 128
    failed = rollart("rewards", "invoke", "mine/mine.py", "--item", '{"completion": ""}')
    assert failed.code == 1
    assert "error" in json.loads(failed.out)[0]
    assert "1 of 1 items failed" in failed.err
    rollart("rewards", "deploy", "mine/mine.py")
    every = rollart("rewards", "logs", "mine", "--json")
    lines = json.loads(every.out)["lines"]
    assert every.err == ""
    last = rollart("rewards", "logs", "mine", "--json", "--limit", str(len(lines) - 1))
    assert json.loads(last.out)["lines"] == lines[1:]
    assert f"the last {len(lines) - 1} lines, there are more" in last.err
    assert r"\x1b[31mred" in rollart("rewards", "logs", "mine").out, "a terminal does not obey what a reward prints"
    assert "mine: no output of these calls in the last 3600 s" in rollart("rewards", "logs", "mine", "--run", "no").err
    assert lines[-1]["text"] == "TypeError: no text"
    assert f"mine,logs,lines,{len(lines) - 1},text,TypeError" in rollart("rewards", "logs", "mine", "-o", "csv").out
    gone = rollart("rewards", "delete", "mine", "--yes", "--json")
    assert json.loads(gone.out) == {"schema_version": 1, "deleted": "mine", "provider": "local"}


def test_whatever_has_formats_has_the_short_form() -> None:
    def commands(group: click.Group) -> Iterator[click.Command]:
        for one in group.commands.values():
            yield from commands(one) if isinstance(one, click.Group) else [one]

    with_formats = 0
    for command in commands(cli):
        names = {opt for option in command.params for opt in option.opts}
        formats = [o for o in command.params if o.name == "output" and isinstance(o.type, click.Choice)]
        with_formats += bool(formats)
        assert not formats or "--json" in names, command.name
    assert with_formats >= 12
    rewards = cli.commands["rewards"]
    assert isinstance(rewards, click.Group)
    for command in commands(rewards):
        kinds = [o.type for o in command.params if o.name == "output"]
        assert [isinstance(kind, click.Choice) and "json" in kind.choices for kind in kinds] == [True], command.name


@pytest.mark.parametrize(("answer", "code", "word"), [("", 2, "nobody answers"), ("n\n", 0, "f stays")])
def test_delete_asks(rollart: Call, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, word: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    done = rollart("rewards", "delete", "f")
    assert (done.code, word in done.err) == (code, True)
