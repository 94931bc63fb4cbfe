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

CALLS: dict[str, tuple[int, int]] = {
    "add_key": (248, 217),
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chmod": (90, -1),
    "chown": (92, -1),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "finit_module": (313, 273),
    "fork": (57, -1),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "futimesat": (261, -1),
    "init_module": (175, 105),
    "inotify_add_watch": (254, 27),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, -1),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
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
    "setxattr": (188, 5),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "uselib": (134, -1),
    "utime": (132, -1),
    "utimensat": (280, 88),
    "utimes": (235, -1),
    "vfork": (58, -1),
    "vhangup": (153, 58),
}
"""System calls that the filter mentions: number on x86_64 and on aarch64, -1 where it has none."""

_REFUSED = [
    "acct",
    "add_key",
    "adjtimex",
    "bpf",
    "chroot",
    "clock_adjtime",
    "clock_settime",
    "delete_module",
    "fanotify_init",
    "finit_module",
    "init_module",
    "ioperm",
    "iopl",
    "ioprio_set",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mbind",
    "migrate_pages",
    "modify_ldt",
    "mount",
    "move_pages",
    "mq_open",
    "mq_unlink",
    "msgget",
    "name_to_handle_at",
    "nfsservctl",
    "open_by_handle_at",
    "perf_event_open",
    "personality",
    "pidfd_getfd",
    "pivot_root",
    "process_madvise",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "reboot",
    "request_key",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
    "semget",
    "set_mempolicy",
    "setdomainname",
    "sethostname",
    "setns",
    "setpriority",
    "settimeofday",
    "shmget",
    "socket",
    "swapoff",
    "swapon",
    "syslog",
    "umount2",
    "unshare",
    "uselib",
    "userfaultfd",
    "vhangup",
]

_ABSENT = [
    "clone3",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "memfd_create",
    "memfd_secret",
    "mount_setattr",
    "move_mount",
    "open_tree",
]
"""Callers fall back to older calls, whose arguments can be inspected (those of clone3 are in memory)."""

_REFUSED_ALONE = [
    "chmod",
    "chown",
    "fchmod",
    "fchmodat",
    "fchown",
    "fchownat",
    "fork",
    "fremovexattr",
    "fsetxattr",
    "futimesat",
    "inotify_add_watch",
    "lchown",
    "lremovexattr",
    "lsetxattr",
    "pidfd_send_signal",
    "removexattr",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "setxattr",
    "tkill",
    "truncate",
    "utime",
    "utimensat",
    "utimes",
    "vfork",
]
"""Refused also without namespaces: calls that Landlock does not cover, and calls that could leave a process behind."""


def program(machine: str, *, single: bool = False) -> bytes:
    """The filter as `struct sock_filter[]`. Raises `KeyError` for a machine without a table.

    `single` is for jobs without namespaces: one process with any number of threads, which may signal only itself.
    """
    column = list(ARCHITECTURES).index(machine)
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
    for name in _REFUSED + (_REFUSED_ALONE if single else []):
        when(name, [_word(_RETURN, _ERRNO | errno.EPERM)])
    when("clone", _if(0, _ANY_BIT, _NEW_NAMESPACES, refuse=True) + (_threads_only() if single else []) + [_allow()])
    when("socketpair", [*_if(0, _EQUAL, _AF_UNIX, refuse=False), _allow()])
    # Zero is the caller itself; a job could otherwise lower the limits of its supervisor.
    when("prlimit64", [*_if(0, _EQUAL, 0, refuse=False), _allow()])
    when("ioctl", [line for n in _TERMINAL_INPUT for line in _if(1, _EQUAL, n, refuse=True)] + [_allow()])
    if single:
        # It dies with its supervisor, and may not change that.
        when("prctl", [*_if(0, _EQUAL, _SET_PDEATHSIG, refuse=True), _allow()])
        for name in ("kill", "tgkill"):
            when(name, [*_if(0, _EQUAL, PID, refuse=False), _allow()])
    code.append(_allow())
    return b"".join(code)


def _if(argument: int, test: int, value: int, *, refuse: bool) -> list[bytes]:
    """EPERM if the low half of an argument passes the test (with `refuse`), or if it does not (without); else
    continue."""
    hit, miss = (0, 1) if refuse else (1, 0)
    return [
        _word(_LOAD, 16 + 8 * argument),
        _word(test, value, hit, miss),
        _word(_RETURN, _ERRNO | errno.EPERM),
    ]


def _threads_only() -> list[bytes]:
    return _if(0, _ANY_BIT, _CLONE_THREAD, refuse=False)


def _allow() -> bytes:
    return _word(_RETURN, _ALLOW)


def _word(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, k)
