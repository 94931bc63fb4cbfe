"""A reward without a secret, which looks for one in each place that a process of its user may read."""

import os
import pathlib

from rollart import Scored, reward


@reward(memory_mb=256)
def curious(sample):
    wanted, found = sample.metadata["wanted"].encode()[::-1], 0
    for path in (*pathlib.Path("/proc").glob("[0-9]*/environ"), *pathlib.Path("/proc").glob("[0-9]*/cmdline")):
        try:
            found += wanted in path.read_bytes()
        except OSError:
            continue
    return Scored(float(found), {"own": float("JUDGE_KEY" in os.environ), "model": float("MODEL" in os.environ)})
