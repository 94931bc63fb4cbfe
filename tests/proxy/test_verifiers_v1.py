"""An environment of verifiers' v1 API against `rollart proxy`: its rollouts are sessions with exact tokens.

verifiers 0.4 needs a separate environment: `ROLLART_VERIFIERS_V1_PYTHON` names its interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.hosting import process
from tests.proxy.scripted import END, WORLD, scripted
from tests.proxy.test_clients import call, proxy

PYTHON = os.environ.get("ROLLART_VERIFIERS_V1_PYTHON", "")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,  # an engine, a proxy and verifiers' programs
    pytest.mark.skipif(not PYTHON, reason="ROLLART_VERIFIERS_V1_PYTHON names no interpreter"),
]


def test_every_rollout_is_a_session_with_its_reward(tmp_path: Path) -> None:
    from rollart.adapters.proxy.chat import ChatFormat

    directory = scripted(tmp_path / "policy", sharp=60.0)
    form = ChatFormat(directory).text
    with (
        process(directory, "--max-context", "1024", "--weight-version", "7") as (engine, _),
        proxy("--engine", engine, "--tokenizer", str(directory)) as url,
    ):
        command = [
            str(Path(PYTHON).parent / "vf-eval"),
            "verifiers_v1",
            "-n",
            "2",
            "-r",
            "2",
            "-m",
            "policy",
            "--no-push",
        ]
        command += ["-o", str(tmp_path / "out"), "--client.base-url", f"{url}/v1", "--client.api-key-var", "NONE"]
        command += ["--env.agent.harness.id", "verifiers_v1", "--env.agent.runtime.type", "subprocess"]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "examples")}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        tell = [sys.executable, str(ROOT / "examples" / "verifiers_v1.py"), url, str(tmp_path / "out")]
        subprocess.run(tell, check=True, timeout=120)
        sessions = [call(f"{url}/sessions/{s['session']}") for s in call(f"{url}/sessions")["sessions"]]
    assert sorted(s["reward"] for s in sessions) == [0.0, 0.0, 1.0, 1.0], "it says world, whatever it is asked for"
    for session in sessions:
        assert [t["begun"] for t in session["turns"]] == ["start", "extends"]
        (branch,) = session["branches"]
        actions = [s for s in branch["segments"] if s["kind"] == "action"]
        assert [form(a["token_ids"]) for a in actions] == [WORLD + END] * 2
        assert all(len(a["logprobs"]) == len(a["token_ids"]) and a["policy_version"] == 7 for a in actions)
