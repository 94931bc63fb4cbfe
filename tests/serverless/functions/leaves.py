"""A reward that starts processes, before its first call and during calls; the score is the worker's process id."""

import os
import pathlib
import subprocess
from multiprocessing import shared_memory

from serverless.declare import reward
from serverless.types import Item


def _child():
    return subprocess.Popen(["sleep", "60"]).pid


def _daemon():
    """An orphan in a session of its own, with the worker's channel closed."""
    ready, done = os.pipe()
    if os.fork() == 0:
        if (daemon := os.fork()) == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "60"])
        os.write(done, str(daemon).encode())
        os._exit(0)
    os.close(done)
    daemon = int(os.read(ready, 20))
    os.close(ready)
    os.wait()
    return daemon


def _ended():
    """An orphan that has ended when the call ends."""
    told = subprocess.run(["sh", "-c", "true & echo $!"], capture_output=True, text=True, check=True)
    orphan = int(told.stdout)
    while (
        pathlib.Path(f"/proc/{orphan}/stat").exists() and " Z " not in pathlib.Path(f"/proc/{orphan}/stat").read_text()
    ):
        pass
    return orphan


def _shared():
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.close()
    memory.unlink()
    return 0


WAYS = {"child": _child, "daemon": _daemon, "ended": _ended, "shared": _shared, "none": lambda: 0}


@reward(memory_mb=256, timeout_s=20.0)
class Leaves:
    def load(self, artefacts):
        self.helper = subprocess.Popen(["sleep", "60"]).pid

    def __call__(self, sample: Item):
        started = WAYS[sample.metadata["do"]]()
        zombies = 0
        for pid in pathlib.Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
            zombies += " Z " in pathlib.Path(f"/proc/{pid}/stat").read_text()
        if sample.metadata.get("raises"):
            raise ValueError("after it started a process")
        metrics = {"started": started, "helper": self.helper, "zombies": zombies}
        return {"score": os.getpid(), "metrics": metrics}
