"""An environment of verifiers' v1 API (0.4) against `rollart proxy`: every rollout is a session with exact tokens.

    pip install 'verifiers>=0.4'                  # in an environment of its own
    rollart proxy --engine URL --tokenizer DIR --listen 127.0.0.1:8100
    PYTHONPATH=examples vf-eval verifiers_v1 -n 4 -r 2 -m policy --no-push -o OUT \\
        --client.base-url http://127.0.0.1:8100/v1 --client.api-key-var ROLLART_KEY \\
        --env.agent.harness.id verifiers_v1 --env.agent.runtime.type subprocess
    python examples/verifiers_v1.py http://127.0.0.1:8100 OUT     # rewards to the sessions

The taskset asks for a word and pays for it; its agent is a program that asks twice, with the OpenAI client. verifiers
sends the id of a rollout's trace with every request (`X-Session-ID`), which names the proxy's session.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

try:
    import verifiers.v1 as vf
except ImportError:  # where rewards are told, which needs nothing
    vf = None

PROGRAM = """\
import json, sys
from openai import OpenAI

url, key, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
with OpenAI(base_url=url, api_key=key) as client:
    for _ in range(2):
        said = client.chat.completions.create(model=model, messages=messages, max_tokens=64)
        messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
"""

if vf is not None:

    class SayData(vf.TaskData):
        word: str

    class SayTask(vf.Task[SayData]):
        @vf.reward(weight=1.0)
        async def said(self, trace: vf.Trace) -> float:
            return float(self.data.word in (trace.last_reply or ""))

    class SayConfig(vf.TasksetConfig):
        num_tasks: int = 4

    class SayTaskset(vf.Taskset[SayTask, SayConfig]):
        def load(self) -> list[SayTask]:
            words = ["world", "moon"]
            return [
                SayTask(SayData(prompt=f"Say {words[i % 2]} ({i}).", word=words[i % 2]), self.config.task)
                for i in range(self.config.num_tasks)
            ]

    class TwiceConfig(vf.HarnessConfig):
        """No knobs."""

    class TwiceHarness(vf.Harness[TwiceConfig]):
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,
            runtime: vf.Runtime,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
        ) -> vf.ProgramResult:
            _, prompt = self.resolve_text_prompt(data)
            argv = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, prompt or ""]
            return await runtime.run_program(argv, {**self.config.resolved_env})

    __all__ = ["SayTaskset", "TwiceHarness"]


def tell(proxy: str, out: Path) -> list[dict[str, object]]:
    """Rewards of rollouts that went well, told to their sessions."""
    told: list[dict[str, object]] = []
    for file in sorted(out.rglob("traces.jsonl")):
        for line in file.read_text().splitlines():
            episode = json.loads(line)
            if not episode["ok"]:  # a fault is no reward
                continue
            for trace in episode["traces"]:
                reward = sum(one["score"] * one["weight"] for one in trace["rewards"].values())
                told.append({"session": trace["id"], "reward": reward})
                url = f"{proxy.rstrip('/')}/sessions/{trace['id']}/end"
                body = json.dumps({"reward": reward}).encode()
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60):
                    pass
    return told


if __name__ == "__main__":
    for one in tell(sys.argv[1], Path(sys.argv[2])):
        print(json.dumps(one))
