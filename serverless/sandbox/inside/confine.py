"""Isolation without a helper binary: namespaces, a private root, Landlock and seccomp by system calls.

Entered by `main` with the descriptor of a socket as its argument; the first frame on it is the configuration:
  mode       "namespaces": user (unless root), mount, pid, network, IPC, UTS and cgroup namespaces, a root of its own
             "single": none of them; jobs are one process each, and see the names, not the content, of host files
             "open": none of them, and jobs may be many processes
  landlock   "must", "try" or "no"
Then the process (process 1 of its namespace, if it has one) goes on as the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from typing import Any

from . import zygote
from .zygote import check, libc

_NEW = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x2000_0000 | 0x4000_0000
_NEW_USER = 0x1000_0000
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_NOSUID, _NODEV, _NOEXEC, _RDONLY = 2, 4, 8, 1
_MOUNT_SETATTR, _CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 20_000
_INSIDE_ID = 1000

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_FILES_BY_ABI = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""LANDLOCK_ACCESS_FS_* rights by version of Landlock (from 5 on: the last)."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    config = zygote.receive(channel)
    if config is None:
        return
    os.umask(0o022)
    try:
        if config["mode"] == "namespaces":
            enter_namespaces(channel, config)
        _restrict(config)
    except BaseException as error:
        zygote.send(channel, {"error": f"{type(error).__name__}: {error}"[:2000]})
        os._exit(70)
    zygote.start(channel, config)


def enter_namespaces(channel: socket.socket, config: dict[str, Any]) -> None:
    """Enter new namespaces. Returns in process 1 of these; the parent stays outside, to end with it."""
    user, group = os.geteuid(), os.getegid()
    parent = os.getppid()
    zygote.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    if config["user_namespace"]:
        check(libc.unshare(_NEW_USER | _NEW), "unshare(user and other namespaces)")
        maps = {"setgroups": "deny", "uid_map": f"{_INSIDE_ID} {user} 1", "gid_map": f"{_INSIDE_ID} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        check(libc.unshare(_NEW), "unshare(namespaces)")
    pid = os.fork()
    if pid:
        channel.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    zygote.prctl(1, signal.SIGKILL)
    os.setsid()
    with contextlib.suppress(OSError):
        socket.sethostname("sandbox")
    _private_root(config)


def _private_root(config: dict[str, Any]) -> None:
    """Build a root of tmpfs with the runtime (read-only), a few devices and the scratch directory."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE, None)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=0755,size=1m")
    os.mkdir("/tmp/host")
    check(libc.syscall(_PIVOT_ROOT[os.uname().machine], b"/tmp", b"/tmp/host"), "pivot_root")
    os.chdir("/")
    for path in config["binds"]:
        _bind(path)
    for target, name in config["links"]:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        os.symlink(target, name)
    os.makedirs("/dev", exist_ok=True)
    for device in _DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(f"/host/dev/{device}", f"/dev/{device}", None, _BIND, None)
    scratch = config["scratch"]
    os.makedirs(scratch, exist_ok=True)
    size = f"mode=0777,size={config['files_bytes']},nr_inodes={_MOST_FILES}"
    _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, size)
    os.symlink(f"{scratch}/shm", "/dev/shm")
    if config.get("proc"):
        os.makedirs("/proc", exist_ok=True)
        with contextlib.suppress(OSError):  # a container may hide parts of it, and then permits no other mount
            _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, None)
    check(libc.umount2(b"/host", _DETACH), "umount of the host's root")
    os.rmdir("/host")
    _read_only("/", recursive=False)


def _bind(path: str) -> None:
    source = f"/host{path}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, path, None, _BIND | _RECURSIVE, None)
    _read_only(path, recursive=True)


def _read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    flags = 0x8000 if recursive else 0
    done = libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, attributes, len(attributes))
    check(done, f"mount_setattr({path})")


def drop_capabilities() -> None:
    """Drop all capabilities. Without new privileges, none can be regained."""
    for capability in range(64):
        if libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0):
            break
    zygote.prctl(47, 4)
    zygote.no_capabilities()


def _restrict(config: dict[str, Any]) -> None:
    zygote.prctl(38, 1)
    if config["landlock"] != "no":
        try:
            _landlock(config)
        except OSError:
            if config["landlock"] == "must":
                raise
    if config["uid"] is None:  # else the change of user drops them
        drop_capabilities()
    if config["zygote_filter"]:
        zygote.seccomp(bytes.fromhex(config["zygote_filter"]))


def _landlock(config: dict[str, Any]) -> None:
    """Restrict files to the runtime (read-only), the scratch directory and devices. Forbid TCP, and signals and
    abstract sockets to the outside."""
    version = max(0, libc.syscall(_CREATE_RULESET, None, 0, 1))  # 0 where the kernel has none
    if version < config["landlock_version"]:
        raise OSError(f"Landlock {version} is older than {config['landlock_version']}")
    files = _FILES_BY_ABI[min(version, 5)]
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=QQQ", files, 3, 3)[:size]
    ruleset = check(libc.syscall(_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    for path in config["readable"]:
        _rule(ruleset, path, reading)
    for device in _DEVICES:
        _rule(ruleset, f"/dev/{device}", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & files)
    _rule(ruleset, config["scratch"], files & ~_IOCTL_DEVICE)
    check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _rule(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        check(libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", access, fd), 0), f"landlock_add_rule({path})")
    finally:
        os.close(fd)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [s.encode() if s is not None else None for s in (source, target, kind, data)]
    done = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    check(done, f"mount of {target}")
