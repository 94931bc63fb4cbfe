"""The filter, run by an interpreter of its instructions, for machines that we do not have too."""

from __future__ import annotations

import errno
import pathlib
import re
import struct

import pytest

from serverless.sandbox import Limits, seccomp
from serverless.sandbox.box import encode_message, read_answer
from serverless.sandbox.launch import hosting_provider

KILL, ALLOW, ERRNO = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
MACHINES = list(seccomp.ARCHITECTURES)


def verdict(code: bytes, machine: str, number: int, *args: int) -> int:
    """An interpreter of classic BPF over `struct seccomp_data`, as in the kernel."""
    filled = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, seccomp.ARCHITECTURES.get(machine, 0x4000_0003), 0, *filled)
    lines = list(struct.iter_unpack("<HBBI", code))
    at = accumulator = 0
    for _ in range(len(lines)):
        operation, yes, no, k = lines[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x06:
            return int(k)
        else:
            test = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
            at += yes if test else no
    raise AssertionError("the filter does not end")


def of(machine: str, name: str, *args: int, single: bool = False) -> int:
    number = seccomp.CALLS[name][MACHINES.index(machine)]
    return verdict(seccomp.program(machine, single=single), machine, number, *args)


EPERM, ENOSYS = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
COMMON = [
    ("socket", (2, 1, 0), EPERM, EPERM),
    ("ptrace", (16, 1), EPERM, EPERM),
    ("mount", (), EPERM, EPERM),
    ("unshare", (0x1000_0000,), EPERM, EPERM),
    ("clone3", (), ENOSYS, ENOSYS),
    ("io_uring_setup", (), ENOSYS, ENOSYS),
    ("clone", (17,), ALLOW, EPERM),
    ("clone", (0x1000_0000 | 17,), EPERM, EPERM),
    ("clone", (0x3D0F00,), ALLOW, ALLOW),
    ("clone", (0x3D0F00 | 0x2000_0000,), EPERM, EPERM),
    ("socketpair", (1, 1, 0), ALLOW, ALLOW),
    ("socketpair", (2, 1, 0), EPERM, EPERM),
    ("prlimit64", (0, 7), ALLOW, ALLOW),
    ("prlimit64", (1, 7), EPERM, EPERM),
    ("ioctl", (0, 0x5412), EPERM, EPERM),
    ("ioctl", (0, 0x541C), EPERM, EPERM),
    ("ioctl", (0, 0x5401), ALLOW, ALLOW),
    ("kill", (1, 9), ALLOW, EPERM),
    ("kill", (0xFFFF_FFFF, 9), ALLOW, EPERM),
    ("kill", (seccomp.PID, 9), ALLOW, ALLOW),
    ("prctl", (1, 0), ALLOW, EPERM),
    ("prctl", (38, 1), ALLOW, ALLOW),
    ("truncate", (), ALLOW, EPERM),
    ("fchmodat", (), ALLOW, EPERM),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "args", "full", "single"), COMMON)
def test_calls_are_refused_by_name_and_argument(
    machine: str, name: str, args: tuple[int, ...], full: int, single: int
) -> None:
    assert of(machine, name, *args) == full
    assert of(machine, name, *args, single=True) == single


@pytest.mark.parametrize("machine", MACHINES)
def test_every_named_call_is_treated_and_every_other_known_one_is_allowed(machine: str) -> None:
    column = MACHINES.index(machine)
    named = {numbers[column] for numbers in seccomp.CALLS.values()}
    code = seccomp.program(machine)
    alone = {*seccomp.REFUSED_ALONE, *seccomp.INSPECTED}
    for number in range(451):
        if number not in named:
            assert verdict(code, machine, number) == ALLOW
    for name in set(seccomp.CALLS) - alone:
        if seccomp.CALLS[name][column] >= 0:
            assert of(machine, name) in (EPERM, ENOSYS), name


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architectures_die_and_unknown_calls_do_not_exist(machine: str) -> None:
    code = seccomp.program(machine)
    assert verdict(code, "i386", 20) == KILL
    assert verdict(code, next(m for m in MACHINES if m != machine), 39) == KILL
    for number in (451, 462, 999, 0x4000_0000 | 39, 0xFFFF_FFFF):
        assert verdict(code, machine, number) == ENOSYS


def test_the_numbers_are_those_of_this_systems_headers() -> None:
    x86 = next(pathlib.Path("/usr/include").glob("*/asm/unistd_64.h"), None)
    generic = pathlib.Path("/usr/include/asm-generic/unistd.h")
    if x86 is None or not generic.exists():
        pytest.skip("no kernel headers are installed")
    for column, header in enumerate((x86, generic)):
        found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE)
        known: dict[str, int] = {}
        for name, number in found:
            known.setdefault(name, int(number))
        assert {name: numbers[column] for name, numbers in seccomp.CALLS.items()} == {
            name: known.get(name, -1) for name in seccomp.CALLS
        }


def test_no_table_no_filter() -> None:
    with pytest.raises(ValueError, match="not in list"):
        seccomp.program("riscv64")


@pytest.mark.parametrize(
    ("environment", "release", "read_only", "expected"),
    [
        ({}, "6.1.0", True, ""),
        ({"AWS_EXECUTION_ENV": "AWS_Lambda_python3.11"}, "5.10.0", True, "lambda"),
        ({"AWS_EXECUTION_ENV": "AWS_Lambda_python3.11"}, "5.10.0", False, ""),
        ({"AWS_LAMBDA_FUNCTION_NAME": "f"}, "5.10.0", True, ""),
        ({"MODAL_TASK_ID": "ta-1"}, "4.4.0", False, "modal"),
        ({"MODAL_TASK_ID": "ta-1"}, "6.1.0", False, ""),
    ],
)
def test_a_provider_is_known_by_more_than_its_variables(
    environment: dict[str, str], release: str, read_only: bool, expected: str
) -> None:
    assert hosting_provider(environment, release=release, root_is_read_only=read_only) == expected


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_mb", "output_bytes", "files_mb", "processes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_an_answer_that_is_none_is_not_believed() -> None:
    good = {"stdout": "", "stderr": "", "status": "ok", "exit_code": 0, "wall_s": 1, "cpu_s": 1, "max_rss_mb": 1}
    assert read_answer(good) is not None
    for change in ({"status": "fine"}, {"exit_code": None}, {"wall_s": "long"}, {"cpu_s": [1]}):
        assert read_answer({**good, **change}) is None
    assert read_answer({}) is None
    assert encode_message({})[:4] == b"\0\0\0\2"
