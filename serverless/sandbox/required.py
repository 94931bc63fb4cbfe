"""Isolation of a whole worker of an untrusted function, whether or not its code uses the sandbox.

Where this machine supports it, such a worker gets its own namespaces (no network, no other process), a read-only root
with Python, this package and the function, its own scratch directory, and its own user if this process is root. A
sandbox inside must still find a rung with namespaces. This is tried once; if it fails, the worker is not isolated,
since the sandbox of the programs matters more. Measured as root on Linux 6.18: bubblewrap works inside this isolation;
inside Landlock (which forbids every mount) only Landlock without namespaces does. System calls are not filtered, as a
sandbox inside needs mounts and namespaces.
"""

from __future__ import annotations

import functools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

_PROBE_S = 60.0


def order(trust: str, *, allow_unsafe: bool) -> dict[str, Any]:
    """The addition to a worker's order (`workers._worker`): `wall`, or nothing."""
    return {"wall": True} if trust == "untrusted" and not allow_unsafe and _works() else {}


def enter(channel: socket.socket, package: str, scratch: str) -> None:
    """Isolate this single-threaded process. Returns in a child; the calling process stays outside, only to end with the
    child. Raises `OSError` if the machine refuses."""
    from serverless.sandbox.inside import confine, zygote
    from serverless.sandbox.launch import SandboxView, unused_uid
    from serverless.sandbox.values import Limits

    root = os.geteuid() == 0
    uid = unused_uid() if root else None
    if root:
        # Independent of the umask; the parent directories still exclude other users.
        for path in (pathlib.Path(package), *pathlib.Path(package).rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    view = SandboxView(Limits(), ("every package",), (str(pathlib.Path(__file__).parents[1]), sys.prefix, package))
    config = {
        "user_namespace": not root,
        "binds": view.binds(),
        "links": view.links(),
        "scratch": scratch,
        "files_bytes": 512 * 2**20,
        "proc": True,
    }
    confine.enter_namespaces(channel, config)
    zygote.prctl(38, 1)
    if uid is None:
        confine.drop_capabilities()
    zygote.become(uid)
    zygote.prctl(1, 9)  # after the change of user, which clears it
    os.mkdir(f"{scratch}/shm", 0o700)
    os.chdir(package)


@functools.cache
def _works() -> bool:
    """True if the isolation works here, and a sandbox with namespaces inside it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        scratch = pathlib.Path(directory, "scratch")
        scratch.mkdir()
        code = "from serverless.sandbox import required; required._probe()"
        source = str(pathlib.Path(__file__).parents[2])
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": source, "TMPDIR": str(scratch)}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, directory],
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.stdout.strip() == b"namespaces"


def _probe() -> None:
    from serverless.sandbox.box import Box, SandboxProcess
    from serverless.sandbox.values import Limits

    directory = sys.argv[1]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        enter(theirs, directory, f"{directory}/scratch")
    with Box(SandboxProcess(None, limits=Limits(), preload=(), allow_unsafe=False), quiet=True) as box:
        if box.run("print(6 * 7)").stdout == "42\n" and box.way not in ("", "without namespaces"):
            print("namespaces", flush=True)
    os._exit(0)
