"""The seccomp filter of the sandbox, assembled without a library for x86_64 and aarch64. Pure.

It refuses system calls that a computing program does not need: tracing, mounts, namespaces, sockets, kernel keys and
modules, shared memory that outlives a process, changes to other processes. A foreign instruction set kills the process;
x32 and calls newer than those known here do not exist (ENOSYS). Numbers: Linux 6.1,
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* by `os.uname().machine`."""

PID = 0x5049_4421
"""Placeholder in the filter of `single=True` for the process's own id, which is known only after the fork."""

_NEWEST = 450
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_KILL, _ALLOW, _ERRNO = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_NEW_NAMESPACES = 0x7E02_0000
_CLONE_THREAD = 0x0001_0000
_AF_UNIX = 1
_SET_PDEATHSIG = 1
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: injecting input into another process's terminal."""

_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}

_ABSENT = {
    "clone3": (435, 435),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
}
"""Callers fall back to older calls, whose arguments can be inspected (those of clone3 are in memory)."""

REFUSED_ALONE = {
    "chmod": (90, -1),
    "chown": (92, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fork": (57, -1),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, -1),
    "inotify_add_watch": (254, 27),
    "lchown": (94, -1),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "pidfd_send_signal": (424, 424),
    "removexattr": (197, 14),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setxattr": (188, 5),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "utime": (132, -1),
    "utimensat": (280, 88),
    "utimes": (235, -1),
    "vfork": (58, -1),
}
"""Refused also without namespaces: calls that Landlock does not cover, and calls that could leave a process behind."""

INSPECTED = {
    "clone": (56, 220),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "tgkill": (234, 131),
}
"""Permitted or refused by their arguments."""

CALLS = _REFUSED | _ABSENT | REFUSED_ALONE | INSPECTED
"""System calls that the filter mentions: number on x86_64 and on aarch64, -1 where it has none."""


def program(machine: str, *, single: bool = False) -> bytes:
    """The filter as `struct sock_filter[]`. Raises `KeyError` for a machine without a table.

    `single` is for jobs without namespaces: one process with any number of threads, which may signal only itself.
    """
    column = list(ARCHITECTURES).index(machine)
    allow = _word(_RETURN, _ALLOW)
    code = [
        _word(_LOAD, 4),
        _word(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _word(_RETURN, _KILL),
        _word(_LOAD, 0),
        _word(_AT_LEAST, _NEWEST + 1, 0, 1),
        _word(_RETURN, _ERRNO | errno.ENOSYS),
    ]

    def when(name: str, body: list[bytes]) -> None:
        number = CALLS[name][column]
        if number >= 0:
            code.extend([_word(_EQUAL, number, 0, len(body)), *body])

    for name in _ABSENT:
        when(name, [_word(_RETURN, _ERRNO | errno.ENOSYS)])
    for name in (*_REFUSED, *(REFUSED_ALONE if single else ())):
        when(name, [_word(_RETURN, _ERRNO | errno.EPERM)])
    threads_only = _if(0, _ANY_BIT, _CLONE_THREAD, refuse=False) if single else []
    when("clone", [*_if(0, _ANY_BIT, _NEW_NAMESPACES, refuse=True), *threads_only, allow])
    when("socketpair", [*_if(0, _EQUAL, _AF_UNIX, refuse=False), allow])
    # Zero is the caller itself; a job could otherwise lower the limits of its supervisor.
    when("prlimit64", [*_if(0, _EQUAL, 0, refuse=False), allow])
    when("ioctl", [line for n in _TERMINAL_INPUT for line in _if(1, _EQUAL, n, refuse=True)] + [allow])
    if single:
        # It dies with its supervisor, and may not change that.
        when("prctl", [*_if(0, _EQUAL, _SET_PDEATHSIG, refuse=True), allow])
        for name in ("kill", "tgkill"):
            when(name, [*_if(0, _EQUAL, PID, refuse=False), allow])
    code.append(allow)
    return b"".join(code)


def _if(argument: int, test: int, value: int, *, refuse: bool) -> list[bytes]:
    """EPERM if the low half of an argument passes the test (with `refuse`), or if it does not (without); else
    continue."""
    hit, miss = (0, 1) if refuse else (1, 0)
    return [_word(_LOAD, 16 + 8 * argument), _word(test, value, hit, miss), _word(_RETURN, _ERRNO | errno.EPERM)]


def _word(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, k)
