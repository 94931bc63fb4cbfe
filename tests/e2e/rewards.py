"""Reward functions of the end-to-end tests. Packed as a file and run in function workers."""

import pathlib
import time

from serverless.declare import reward


@reward(memory_mb=128, timeout_s=5.0, deterministic=False)
def rule(sample):
    return 1.0 if sample.messages[-1]["content"] == sample.reference_answer else 0.25


@reward(memory_mb=128, timeout_s=5.0, deterministic=False)
def raises(sample):
    raise ValueError("the answer key is missing")


@reward(memory_mb=128, timeout_s=5.0, deterministic=False)
def nan(sample):
    return float("nan")


@reward(memory_mb=128, timeout_s=0.3, deterministic=False)
def sleeps(sample):
    time.sleep(30)
    return 1.0


SEEN = []


@reward(memory_mb=128, timeout_s=5.0, deterministic=False)
def counts(sample):
    """Keeps state: what it pays depends on what it saw before, so it cannot leave for functions."""
    SEEN.append(sample.id)
    return 1.0 if len(SEEN) > 0 else 0.25


@reward(memory_mb=128, timeout_s=5.0, deterministic=False)
def slow(sample):
    """Long enough in a worker that a test can kill it there."""
    time.sleep(0.2)
    pathlib.Path("here").touch()
    return 1.0 if sample.messages[-1]["content"] == sample.reference_answer else 0.25
