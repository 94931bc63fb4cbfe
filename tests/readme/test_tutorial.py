"""The tutorials run as written: that of rewards on local workers, on AWS Lambda's API and on Modal's."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.serverless.aws.provider import REGION, AwsLambda
from tests.serverless.modal_plane.provider import MISSING, running_plane

ROOT = Path(__file__).parents[2]
TUTORIAL, AGENT = ROOT / "docs/tutorial-rewards.md", ROOT / "docs/tutorial-agent.md"

EXPECTED = (
    r"wrong +ok +0",
    r"spelled +out_of_memory +every +3 masked",
    r"create (?:spelled|app rollart-spelled|the Lambda function rollart-spelled)\b",
    r'"aggregate_reward_score": 1.0',
    r"\+ +right = sum",
    r"50.0%",
    r'"aggregate_reward_score": 0.333',
    r"finished: 3 steps",
    r"reference: spelled@live",
    r"first-\w+ spell-[\d.]+ wrong: \w{8}",
    r"canary +2",
    r"100.0%",
    r"Agreement of scores",
    r"Function calls",
    r"spelled is deleted on (?:local|aws_lambda|modal)",
)
"""One line of each command's output, in the order of the commands."""

AGENT_EXPECTED = (
    r"code-agent.yaml: ok",
    r"host started: environment-0",
    r"held-out success at v0",
    r"finished: 2 steps",
    r"tests +local +ok +call",
    r"curve of agent",
    r"environment-0 +environment",
    r"tasks: tasks:task",
    r"decode +h20",
    r"environment +sandboxes",
    r"code +functions",
    r"trajectories trained",
)
"""Likewise, of the agent's tutorial."""

ANYWHERE = r"^rollart rewards (?:test|doctor) .*\n"
"""Commands that ask no provider. They run in the local variant alone."""


SMALL = "steps=2 batch.trajectories=16 warm_start.batches=4 evaluation.episodes=8 training.epochs=1"
"""Settings of the agent's run here, which takes minutes as written."""


def blocks(path: Path = TUTORIAL) -> Iterator[tuple[str, str, str]]:
    """The language, file name and text of each code block that has a language."""
    yield from re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@contextlib.contextmanager
def account(provider: str, key: str) -> Iterator[dict[str, str]]:
    """The environment of a user of the provider, who has stored the secret there."""
    with contextlib.ExitStack() as stack:
        if provider == "aws_lambda":
            from tests.serverless.aws.provider import client, plane

            aws = stack.enter_context(plane())
            client(aws, "secretsmanager").create_secret(Name="rollart/log-key", SecretString=key)
            yield {"AWS_ENDPOINT_URL": aws.url, "AWS_REGION": REGION}
        elif provider == "modal":
            stack.enter_context(running_plane())
            import modal

            modal.Secret.objects.create("rollart-log-key", {"LOG_KEY": key})
            yield {}
        else:
            yield {}


def test_no_command_line_has_a_secret_value() -> None:
    """Command lines are in the process list, which every user of a machine can read."""
    for path in sorted(TUTORIAL.parent.glob("*.md")):
        found = re.findall(
            r"^.*(?:--secret-string|--from-literal|secret create).*(?:\$\(|=\.\.\.).*$", path.read_text(), re.M
        )
        assert not found, f"{path.name}: {found}"


@pytest.mark.slow  # commands and a run in processes of their own
@pytest.mark.parametrize("provider", ["local", "aws_lambda", "modal"])
def test_the_tutorial_runs_as_written(provider: str, tmp_path: Path) -> None:
    missing = {"aws_lambda": AwsLambda.missing, "modal": MISSING}.get(provider)
    if missing:
        pytest.skip(str(missing))
    key = "0123456789abcdef"
    script = ["set -eu -o pipefail"]
    for number, (language, name, text) in enumerate(blocks()):
        if name:
            (tmp_path / str(number)).write_text(text)
            script.append(f"mkdir -p $(dirname {name}) && cp {number} {name}")
        elif language == "bash":
            text = text if provider == "local" else re.sub(ANYWHERE, "", text, flags=re.MULTILINE)
            script.append(text.replace("PROVIDER=local", f"PROVIDER={provider}"))
    with account(provider, key) as variables:
        shown = output(script, tmp_path, variables)
    for value in (key, (tmp_path / ".env").read_text().strip().partition("=")[2]):
        assert value not in shown
    assert_in_order(EXPECTED if provider == "local" else EXPECTED[2:], shown)


@pytest.mark.slow  # a run in processes of its own, a plan and a simulation: about 30 CPU-seconds
def test_the_agents_tutorial_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "rollart/configs")
    script = ["set -eu -o pipefail"]
    for language, name, text in blocks(AGENT):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "bash":
            text = re.sub(r"^(rollart launch .*)$", rf"\1 {SMALL}", text, flags=re.MULTILINE)
            script.append(text.replace("--policies sync,rollart --steps 6", "--policies rollart --steps 1"))
    shown = output(script, tmp_path, {})
    assert "infra" not in shown.partition("Function calls")[0]
    assert_in_order(AGENT_EXPECTED, shown)
    lines = {line for language, _, text in blocks(AGENT) if language == "yaml" for line in text.splitlines()}
    assert lines <= set((ROOT / "rollart/configs/runs/code-agent.yaml").read_text().splitlines())


def output(script: list[str], directory: Path, variables: dict[str, str]) -> str:
    """What the script prints in the directory; it has to succeed."""
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        env={
            **os.environ,
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        },
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def assert_in_order(patterns: Sequence[str], shown: str) -> None:
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(shown, at)
        assert found is not None, f"{pattern} after {shown[at : at + 6000]}"
        at = found.end()
