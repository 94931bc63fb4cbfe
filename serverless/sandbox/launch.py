"""The isolation ladder: the launch methods of a sandbox on this machine, best first. Does not block.

provider     inside AWS Lambda or Modal: the provider's own boundary, plus seccomp and Landlock where they work
bubblewrap   bwrap: namespaces and a private root; seccomp
landlock     the same without a binary; Landlock and seccomp alone where namespaces are refused (Linux 6.2)
unsafe       limits only: a program can read and send everything that this user can
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serverless.sandbox import seccomp
from serverless.sandbox.inside.scratch import empty
from serverless.sandbox.values import Limits

LADDER = ("provider", "bubblewrap", "landlock")
UNSAFE = "unsafe"

_INSIDE = pathlib.Path(__file__).parent / "inside"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
"""Host paths that are visible besides the Python installation: shared libraries and tools, and the links to them."""

_SCRATCH, _OTHER_SCRATCH = "/tmp", "/scratch"
"""Scratch paths. Programs write to the second where Python or this package is installed below the first, which would
hide it."""

_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "MALLOC_ARENA_MAX": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The whole environment of a program. A fixed hash seed makes the order of sets deterministic, and a single malloc
arena avoids 64 MiB of address space per thread, which would count against the memory limit."""

_FIRST_UID = 1_900_000_000
"""As root, every sandbox runs as its own user id above this one: it owns no files of other users, and process limits
count for it alone."""


class RungUnavailable(Exception):
    """The reason why a launch method cannot be used here."""


@dataclass
class Launched:
    """A started process, its socket, its configuration to send first, and the paths to remove at its end."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    config: dict[str, Any]
    log: Any
    scratch: pathlib.Path | None = None

    def complaint(self) -> str:
        """The output before confinement: the reason of a failed start."""
        self.log.seek(0)
        return " ".join(self.log.read(2000).decode(errors="replace").split())

    def end(self) -> None:
        """Kill the remaining processes. The namespace ends with its first process."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.log.close()
        if self.scratch is not None:
            with contextlib.suppress(OSError):
                empty(str(self.scratch), most=sys.maxsize)
                self.scratch.rmdir()


async def exited(pid: int) -> None:
    """Wait for the end of a child process."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


@dataclass(frozen=True)
class LaunchMethod:
    """One launch method of a rung. It may raise `RungUnavailable`, and the launched process may still fail to get
    ready."""

    rung: str
    name: str
    start: Callable[[], Launched]


def launch_methods(rung: str | None, *, limits: Limits, preload: Sequence[str]) -> list[LaunchMethod]:
    """The launch methods of a rung, or (None) of every rung but `unsafe`, best first."""
    view = SandboxView(limits, tuple(preload))
    root = os.geteuid() == 0
    known = [
        LaunchMethod("provider", "provider", lambda: _on_provider(view)),
        *([LaunchMethod("bubblewrap", "as root", lambda: _bubblewrap(view, user_namespace=False))] if root else []),
        LaunchMethod("bubblewrap", "with a user namespace", lambda: _bubblewrap(view, user_namespace=True)),
        *([LaunchMethod("landlock", "as root", lambda: _landlock(view, user_namespace=False))] if root else []),
        LaunchMethod("landlock", "with a user namespace", lambda: _landlock(view, user_namespace=True)),
        # Version 3 of Landlock is the first that protects files from truncation.
        LaunchMethod("landlock", "without namespaces", lambda: _single(view, landlock="must", landlock_version=3)),
        LaunchMethod(UNSAFE, "limits only", lambda: _without_namespaces(view, mode="open")),
    ]
    chosen = [way for way in known if (way.rung == rung if rung else way.rung != UNSAFE)]
    if not chosen:
        raise ValueError(f"rung={rung!r} is none of {', '.join((*LADDER, UNSAFE))}")
    return chosen


def hosting_provider(environment: Mapping[str, str], *, release: str, root_is_read_only: bool) -> str:
    """'lambda' or 'modal' if this process runs inside one, else ''.

    Variables alone prove nothing, since test harnesses set them too: Lambda's root is read-only, and Modal's kernel is
    gVisor, which reports the release 4.4.0.
    """
    if environment.get("AWS_EXECUTION_ENV", "").startswith("AWS_Lambda_") and root_is_read_only:
        return "lambda"
    if environment.get("MODAL_TASK_ID") and release.startswith("4.4.0"):
        return "modal"
    return ""


@dataclass(frozen=True)
class SandboxView:
    """The part of this machine that is visible in a sandbox: its libraries, Python, the installed packages if there is
    a module to preload, and `more` paths."""

    limits: Limits
    preload: tuple[str, ...]
    more: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)

    @property
    def packages(self) -> list[str]:
        """The paths of installed packages. A sandbox without preloads sees only the standard library."""
        if not self.preload:
            return []
        found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        return list(dict.fromkeys(os.path.realpath(p) for p in found if os.path.isdir(p)))

    def binds(self) -> list[str]:
        system = [p for p in _SYSTEM if os.path.exists(p) and not os.path.islink(p)]
        runtime = [os.path.realpath(p) for p in (sys.base_prefix, sys.base_exec_prefix)]
        paths = [*system, *dict.fromkeys([*runtime, *self.packages]), str(_INSIDE), *map(os.path.realpath, self.more)]
        return [p for n, p in enumerate(paths) if not any(_within(p, q) for q in paths[:n])]

    @property
    def scratch(self) -> str:
        return _OTHER_SCRATCH if any(_within(path, _SCRATCH) for path in self.binds()) else _SCRATCH

    @property
    def environment(self) -> dict[str, str]:
        if self.scratch == _SCRATCH:
            return _ENVIRONMENT
        return {**_ENVIRONMENT, "HOME": self.scratch, "TMPDIR": self.scratch}

    def links(self) -> list[tuple[str, str]]:
        return [(os.readlink(p), p) for p in _SYSTEM if os.path.islink(p)]

    def config(self, **changes: Any) -> dict[str, Any]:
        return {
            "mode": "namespaces",
            "landlock": "no",
            "landlock_version": 1,
            "user_namespace": False,
            "binds": self.binds(),
            "links": self.links(),
            "readable": self.binds(),
            "files_bytes": self.limits.files_mb * 2**20,
            "scratch": self.scratch,
            "inside": str(_INSIDE.parent),
            "paths": self.packages,
            "preload": list(self.preload),
            "uid": None,
            "others": 0,
            "sealed": True,
            "zygote_filter": "",
            "job_filter": "",
            **changes,
        }

    def command(self, entry: str, fd: int) -> list[str]:
        code = f"import sys; sys.path.insert(0, {str(_INSIDE.parent)!r}); from inside.{entry} import main; main()"
        return [self.python, "-s", "-S", "-P", "-c", code, str(fd)]


def _bubblewrap(view: SandboxView, *, user_namespace: bool) -> Launched:
    binary = shutil.which("bwrap")
    if binary is None:
        raise RungUnavailable("bwrap is not installed")
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    arguments += ["--cap-drop", "ALL"]
    if user_namespace:
        arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in view.environment.items():
        arguments += ["--setenv", name, value]
    # bwrap's default mode of a parent directory excludes other users.
    for parent in dict.fromkeys(str(p) for path in view.binds() for p in reversed(pathlib.Path(path).parents[:-1])):
        arguments += ["--perms", "0755", "--dir", parent]
    arguments += ["--perms", "0755", "--dir", "/dev"]
    for path in view.binds():
        arguments += ["--ro-bind", path, path]
    for target, name in view.links():
        arguments += ["--symlink", target, name]
    for device in ("null", "zero", "full", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--symlink", f"{view.scratch}/shm", "/dev/shm"]
    arguments += ["--perms", "0777", "--size", str(view.limits.files_mb * 2**20), "--tmpfs", view.scratch]
    arguments += ["--remount-ro", "/", "--chdir", "/"]
    config = view.config(uid=None if user_namespace else unused_uid(), job_filter=_uncounted(user_namespace))
    # bwrap reads the filter from a descriptor, to its end.
    with tempfile.TemporaryFile() as rules:
        rules.write(_filter())
        rules.seek(0)
        head = [binary, *arguments, "--seccomp", str(rules.fileno())]
        return _launch(head, view, "zygote", config, pass_fds=[rules.fileno()])


def _landlock(view: SandboxView, *, user_namespace: bool) -> Launched:
    code = _filter().hex()
    config = view.config(
        landlock="must",
        user_namespace=user_namespace,
        zygote_filter=code,
        job_filter=_uncounted(user_namespace),
        uid=None if user_namespace else unused_uid(),
    )
    return _launch([], view, "confine", config)


def _on_provider(view: SandboxView) -> Launched:
    read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
    where = hosting_provider(os.environ, release=os.uname().release, root_is_read_only=read_only)
    if not where:
        raise RungUnavailable("not inside AWS Lambda or Modal")
    with contextlib.suppress(RungUnavailable):
        return _single(view, landlock="try")
    return _without_namespaces(view, mode="open", landlock="try")


def _single(view: SandboxView, **changes: Any) -> Launched:
    """Jobs of a single process."""
    return _without_namespaces(view, mode="single", job_filter=_filter(single=True).hex(), **changes)


def _without_namespaces(view: SandboxView, **changes: Any) -> Launched:
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="rollart-sandbox-")).resolve()
    uid = unused_uid() if os.geteuid() == 0 and all(map(_readable_by_all, view.binds())) else None
    others = 0 if uid else _threads_of(os.geteuid())
    if uid:
        os.chown(scratch, uid, uid)
    try:
        config = view.config(scratch=str(scratch), uid=uid, others=others, sealed=False, **changes)
        launched = _launch([], view, "confine", config)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    launched.scratch = scratch
    return launched


def _launch(
    head: list[str], view: SandboxView, entry: str, config: dict[str, Any], *, pass_fds: Sequence[int] = ()
) -> Launched:
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - `Launched` closes it
    try:
        with theirs:
            process = subprocess.Popen(
                [*head, *view.command(entry, theirs.fileno())],
                pass_fds=[theirs.fileno(), *pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=view.environment if config["mode"] == "namespaces" else _ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        log.close()
        raise RungUnavailable(str(error)) from None
    return Launched(process, ours, config, log)


def _filter(*, single: bool = False) -> bytes:
    machine = os.uname().machine
    if machine not in seccomp.ARCHITECTURES:
        raise RungUnavailable(f"no seccomp filter for {machine}, only for {', '.join(seccomp.ARCHITECTURES)}")
    return seccomp.program(machine, single=single)


def _uncounted(user_namespace: bool) -> str:
    """A filter that forbids new processes where the kernel does not count them: for the real root user, whatever a
    namespace calls it."""
    return _filter(single=True).hex() if user_namespace and os.geteuid() == 0 else ""


def unused_uid() -> int:
    """A user id that no live sandbox uses: process ids are unique."""
    return _FIRST_UID + (os.getpid() * 32 + next(_numbers) % 32) % 200_000_000


_numbers = itertools.count(1)


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent.rstrip("/") + "/")


def _readable_by_all(path: str) -> bool:
    return all(p.stat().st_mode & 0o001 for p in (pathlib.Path(path), *pathlib.Path(path).parents) if p.is_dir())


def _threads_of(uid: int) -> int:
    """Allowance for limits that count all processes of a user: twice the current number, as others come and go."""
    threads = 0
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == uid:
                threads += len(list((directory / "task").iterdir()))
    return 2 * threads + 64
