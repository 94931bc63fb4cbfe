"""The wall around a worker of an untrusted function, tried by code that runs in the worker itself."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket

import pytest

from serverless.sandbox import required
from serverless.types import Item
from serverless.wire import encode
from serverless.workers.local import LocalBackend
from tests.serverless.support import descendants, package, until

pytestmark = [
    pytest.mark.slow,  # real processes
    pytest.mark.skipif(not required.order("untrusted", allow_unsafe=False), reason="no wall stands on this machine"),
]

HEAD = "import os, socket, sys\ndef tried(f):\n    try: f()\n    except Exception: return 0\n    return 1\n"


async def score(backend: LocalBackend, program: str, **metadata: object) -> dict[str, object]:
    messages = ({"role": "user", "content": ""}, {"role": "assistant", "content": program})
    reply = await backend.invoke("nosy", [encode(Item("a", messages, None, metadata))], deadline_s=60.0)
    assert reply.fault is None, reply.fault
    assert isinstance(reply.body, list)
    [answer] = reply.body
    assert "error" not in answer, answer
    found: dict[str, object] = answer
    return found


def test_code_beside_the_sandbox_reaches_nothing_of_the_host(tmp_path: pathlib.Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        attempts = {
            "reads a file": f"open({str(secret)!r}).read()",
            "writes a file": f"open({str(secret)!r}, 'w').write('x')",
            "reads passwords": "open('/etc/passwd').read()",
            "reads the home directory": "os.listdir('/root/.ssh')",
            "connects": f"socket.create_connection(('127.0.0.1', {port}), 2)",
            "signals the caller": f"os.kill({os.getpid()}, 0)",
            "changes the function": "open(os.getcwd() + '/rollart_handler.py', 'a')",
            "changes Python": "open(os.__file__, 'a')",
            "becomes root": "os.setuid(0)",
            "mounts": "print('x', file=sys.stderr) or (_ for _ in ()).throw(OSError) "
            "if __import__('ctypes').CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None) else None",
        }

        more = {
            "sees processes": "print(len([p for p in os.listdir('/proc') if p.isdigit()]))",
            "writes its scratch": "print(tried(lambda: open(os.environ['TMPDIR'] + '/x', 'w')))",
        }

        async def main() -> dict[str, object]:
            async with LocalBackend() as backend:
                await backend.deploy(package("nosy"))
                scores = {}
                for name, attempt in attempts.items():
                    program = f"{HEAD}print(tried(lambda: {attempt}))"
                    scores[name] = (await score(backend, program))["aggregate_reward_score"]
                for name, program in more.items():
                    scores[name] = (await score(backend, HEAD + program))["aggregate_reward_score"]
                return scores

        scores = asyncio.run(main())
    assert secret.read_text() == "secret"
    assert scores == {**dict.fromkeys(attempts, 0.0), "sees processes": 1.0, "writes its scratch": 1.0}


def test_a_sandbox_inside_the_wall_keeps_its_namespaces_and_ends_with_the_worker() -> None:
    async def main() -> None:
        before = set(descendants())
        async with LocalBackend() as backend:
            await backend.deploy(package("nosy"))
            answer = await score(backend, "print(6 * 7)", sandboxed=True)
            assert answer["aggregate_reward_score"] == 42.0
            assert answer["metrics_list"] == [{"name": "namespaces", "value": 1.0, "type": "Metric"}]
            assert set(descendants()) > before
        await until(lambda: set(descendants()) <= before)

    asyncio.run(main())
