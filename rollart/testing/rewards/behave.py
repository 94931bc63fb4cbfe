"""A reward that performs the action named by its item. Run as a function; never imported by the code under test."""

import os
import pathlib
import subprocess
import sys
import time
import urllib.request

from serverless.declare import reward
from serverless.errors import PolicyFault
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Scored


@reward(memory_mb=128, timeout_s=5.0)
def behave(sample: Item):
    what = sample.metadata.get("do", "score")
    if what == "sleep":
        time.sleep(sample.metadata["seconds"])
    elif what == "exit":
        os._exit(3)
    elif what == "leave":
        sys.exit(4)
    elif what == "eat":
        return len(bytearray(1 << 30))
    elif what == "orphan":
        child = subprocess.Popen(["sleep", "60"])
        pathlib.Path(sample.metadata["file"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    elif what == "daemon":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True, close_fds=False)
        pathlib.Path(sample.metadata["file"]).write_text(f"{os.getpid()} {child.pid}")
        os._exit(3)
    elif what == "print":
        print("x" * 2**20 * 17, flush=True)
    elif what == "last words":
        print("about to die", flush=True)
        os._exit(3)
    elif what == "environ":
        return {"score": 1.0, "metrics": {"leaked": float("ROLLART_SECRET" in os.environ)}}
    elif what == "next":
        urllib.request.urlopen(f"http://{os.environ['AWS_LAMBDA_RUNTIME_API']}/2018-06-01/runtime/invocation/next")
    elif what == "pid":
        return float(os.getpid())
    return RESULTS[what](sample)


def _raise(sample):
    raise ValueError(f"no such {sample.id}")


def _policy(sample):
    raise PolicyFault("not JSON", floor=-1.0)


def _gate(sample):
    gate = pathlib.Path(sample.metadata["file"])
    gate.with_suffix(f".{os.getpid()}").touch()
    while not gate.exists():
        time.sleep(0.02)
    return sample.metadata["value"]


RESULTS = {
    "gate": _gate,
    "score": lambda s: s.metadata.get("value", 1.0),
    "sleep": lambda s: 1.0,
    "whisper": lambda s: 1.0,
    "print": lambda s: 1.0,
    "raise": _raise,
    "policy": _policy,
    "model_fault": lambda s: ModelFault(0.25, "too long"),
    "model_fault_dict": lambda s: {"model_fault": "too long", "floor": 0.25},
    "infra": lambda s: InfraFault(FaultKind.THROTTLED, retryable=False, detail="judge"),
    "scored": lambda s: Scored(0.5, {"m": 2.0}, (0.25, 0.25)),
    "dict": lambda s: {"score": 0.5, "metrics": {"m": 2}, "steps": [0.25, 0.25]},
    "steps": lambda s: Scored(len(s.metadata["text"]), {}, (0.123456789,) * s.metadata["count"]),
    "nan": lambda s: float("nan"),
    "inf": lambda s: float("inf"),
    "none": lambda s: None,
    "text": lambda s: "0.7",
    "true": lambda s: True,
    "completion": lambda s: float(s.completion == "out" and s.messages[0]["role"] == "user"),
}
