"""A reward with a helper process, which crashes during a call; the score of the next call is the helper's exit code."""

import os
import subprocess

from serverless.declare import reward
from serverless.types import Item


@reward(memory_mb=256, timeout_s=20.0)
class Helped:
    def load(self, artefacts):
        self.helper = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)

    def __call__(self, sample: Item):
        if sample.metadata["do"] == "crash":
            self.helper.stdin.close()
            os.waitid(os.P_PID, self.helper.pid, os.WEXITED | os.WNOWAIT)
            return 1.0
        return float(self.helper.poll() or 0)
