"""Suppression of C code's output: HiGHS 1.12 (scipy 1.17) announces repairs of rounded solutions on C's standard output
whatever its log options (ERGO-Code/HiGHS issue 2783), which would end up in the JSON that a program writes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["suppress_c_stdout"]

_lock = threading.Lock()
_state: dict[str, int] = {"depth": 0, "stdout": 0, "nowhere": 0}


@contextmanager
def suppress_c_stdout() -> Iterator[None]:
    """Discard the output of C code to `stdout` in this context. Python's output and file descriptor 1 are unaffected:
    only glibc's `stdout` variable refers to another stream. With another libc nothing changes, and a stray line may
    appear."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    stdout = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout")
    with _lock:
        _state["nowhere"] = _state["nowhere"] or _null_stream()
        if _state["nowhere"] and _state["depth"] == 0:
            _state["stdout"], stdout.value = stdout.value or 0, _state["nowhere"]
        _state["depth"] += 1
    try:
        yield
    finally:
        with _lock:
            _state["depth"] -= 1
            if _state["nowhere"] and _state["depth"] == 0:
                stdout.value = _state["stdout"]


def _null_stream() -> int:
    """A C stream to /dev/null, opened once; 0 if there is none."""
    fopen = ctypes.CDLL(None).fopen
    fopen.restype, fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    return fopen(os.devnull.encode(), b"w") or 0
