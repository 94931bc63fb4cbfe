"""OpenEnv's real server as a process, for tests: run by an interpreter that has `openenv` (`make openenv`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PYTHON", "serve", "served"]

PYTHON = os.environ.get("ROLLART_OPENENV_PYTHON", str(Path(__file__).parents[2] / ".venv-openenv/bin/python"))


def serve(sessions: int) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL: a small game for so many sessions at a time."""
    server = subprocess.Popen(
        [PYTHON, str(Path(__file__).with_name("openenv_server.py")), str(sessions)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{server.stdout.readline().strip()}"


@contextlib.contextmanager
def served(sessions: int) -> Iterator[str]:
    """Its URL, while it runs."""
    server, url = serve(sessions)
    try:
        yield url
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
