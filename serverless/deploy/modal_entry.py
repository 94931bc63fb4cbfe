"""The program of a Modal container: the package's handler, with answers that need no pickle.

Deployed with a package under one root, from which Modal imports it as `serverless.deploy.modal_entry`. `call` takes and
returns JSON as bytes, and raises no exception of the function's code:

  in    {"id", "name", "version", "memory_mb", "timeout_s", "event": [...]}, and "run" for a call of a run
  out   {"worker", "call", "version", "init_s", "run_s"} and "body", or "fault": {"kind", "detail", "retryable"}

`init_s` is the container's start-up time in its first answer, and 0 in later ones. `call` is Modal's id of the call.
"""
# ruff: noqa: TID251 - a container measures its own time; the loop's clock is in another process.

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time
import traceback
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

VERSION = "rollart_version"
"""The file with the version of a container's package."""

_ROOT = pathlib.Path(__file__).parents[2]

_DETAIL = 500


@dataclass(frozen=True)
class ContainerContext:
    """Lambda's context object: the fields that handlers use."""

    function_name: str
    function_version: str
    memory_limit_in_mb: int
    aws_request_id: str
    deadline: float
    client_context: Any

    @property
    def invoked_function_arn(self) -> str:
        return f"arn:modal:function:{self.function_name}:{self.function_version}"

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self.deadline - time.monotonic()) * 1000.0))


@dataclass
class _Container:
    handler: Any
    version: str
    init_s: float
    """The start-up seconds for the next answer."""


def call(payload: bytes) -> bytes:
    """One call of the function. See the module's docstring."""
    request = json.loads(payload)
    began = time.monotonic()
    answer = _run(request, began)
    answer["worker"] = os.environ.get("MODAL_TASK_ID") or f"pid-{os.getpid()}"
    answer["call"] = _call_id()
    answer["version"] = _container.version
    answer["run_s"] = time.monotonic() - began
    answer["init_s"], _container.init_s = _container.init_s, 0.0
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the answer has no wire form: {error}"[:_DETAIL]
        answer["fault"] = {"kind": "bad_answer", "detail": detail, "retryable": False}
        del answer["body"]
        return json.dumps(answer).encode()


def _run(request: dict[str, Any], began: float) -> dict[str, Any]:
    context = ContainerContext(
        function_name=request["name"],
        function_version=request["version"],
        memory_limit_in_mb=request["memory_mb"],
        aws_request_id=request["id"],
        deadline=began + request["timeout_s"],
        client_context=SimpleNamespace(custom={"run": request["run"]}) if "run" in request else None,
    )
    try:
        return {"body": _container.handler(request["event"], context)}
    except MemoryError:
        return _fault("out_of_memory", f"more than {request['memory_mb']} MB (memory_mb)", retryable=True)
    except SystemExit as error:
        return _fault("crash", f"SystemExit: {error}", retryable=True)
    except Exception as error:
        traceback.print_exc()
        return _fault("crash", f"{type(error).__name__}: {error}", retryable=False)
    finally:
        sys.stdout.flush()


def _fault(kind: str, detail: str, *, retryable: bool) -> dict[str, Any]:
    return {"fault": {"kind": kind, "detail": detail[:_DETAIL], "retryable": retryable}}


def _call_id() -> str:
    current = getattr(sys.modules.get("modal"), "current_function_call_id", None)
    return str(current() or "") if current is not None else ""


def _age() -> float:
    """Seconds since this process started, or 0 if the system does not report it."""
    try:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _load() -> _Container:
    began = time.monotonic()
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    handler = importlib.import_module("rollart_handler").handler
    return _Container(handler, (_ROOT / VERSION).read_text(), max(_age(), time.monotonic() - began))


if (_ROOT / "rollart_manifest.json").exists():
    # As on Lambda, the function loads when its module is imported. A deployer has no manifest, so it runs no user code.
    _container = _load()
