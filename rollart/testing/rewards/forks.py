"""A reward that forks in ways that users' code does. Run as a function; never imported by the code under test."""

import ctypes
import multiprocessing
import os
import sys

from serverless.declare import reward
from serverless.types import Item

_FORKS = {
    "os": os.fork,
    "libc": lambda: ctypes.CDLL(None).fork(),
}


def _double(value, queue):
    queue.put(value * 2.0)


@reward(memory_mb=256, timeout_s=20.0)
def forks(sample: Item):
    value = sample.metadata["value"]
    method = sample.metadata["do"]
    if method == "multiprocessing":
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_double, args=(value, queue))
        child.start()
        doubled = queue.get()
        child.join()
        return doubled / 2.0
    child, raises = _FORKS[method](), sample.metadata.get("raises")
    if child == 0:
        if raises == "exit":
            sys.exit(3)
        if raises:
            raise ValueError("in the child")
        return -value - 1000.0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return value if code == {"exit": 3, True: 1, False: 0}[raises] else f"the child ended with {code}"
