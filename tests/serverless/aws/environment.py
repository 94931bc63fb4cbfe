"""An execution environment of Lambda: the Runtime API over HTTP, and a process that runs the real `awslambdaric`.

It sees its code, `awslambdaric`, `boto3` and the standard library, and nothing else of this machine's Python: an
archive that lacks a module fails here as it would there.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import math
import os
import pathlib
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_POLL_S = 0.01
_INIT_S = 10.0


@dataclass
class Answer:
    """The result of one invocation. Milliseconds as Lambda reports them."""

    payload: bytes
    error: bool = False
    alive: bool = True
    run_ms: float = 0.0
    init_ms: float = 0.0
    used_mb: int = 0
    status: str = ""
    logs: str = ""

    @property
    def billed_ms(self) -> int:
        return math.ceil(self.run_ms + self.init_ms)


def runtime_path(directory: pathlib.Path) -> pathlib.Path:
    """A folder with only awslambdaric and boto3 with their dependencies, as Lambda's runtime has them."""
    ours = ("awslambdaric", "runtime_client", "simplejson", "snapshot_restore_py")
    for module in (*ours, "boto3", "botocore", "s3transfer", "jmespath", "dateutil", "six", "urllib3"):
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:
            continue
        origin = pathlib.Path(found.origin)
        target = origin.parent if found.submodule_search_locations else origin
        with contextlib.suppress(FileExistsError):
            (directory / target.name).symlink_to(target)
    return directory


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def do_GET(self) -> None:
        environment = self.server.environment
        environment.ready.set()
        order = environment.inbox.get()
        if order is None:
            self.close_connection = True
            return
        self._send(200, order.event, order.headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        environment = self.server.environment
        if self.path.endswith("/init/error"):
            environment.answers.put(("init", body))
        else:
            environment.answers.put(("error" if self.path.endswith("/error") else "response", body))
        self._send(202, b'{"status":"OK"}', {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    environment: Environment

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The runtime was killed in the middle of a request."""


@dataclass
class _Order:
    event: bytes
    headers: dict[str, str]


@dataclass
class Environment:
    """One process and its Runtime API. Serves one invocation at a time; `kill` ends both."""

    code: pathlib.Path
    runtime: pathlib.Path
    log: pathlib.Path
    name: str
    version: str
    arn: str
    handler: str
    memory_mb: int
    timeout_s: float
    variables: dict[str, str] = field(default_factory=dict)
    account: dict[str, str] = field(default_factory=dict)
    """Variables with the region, the role's credentials and the endpoint."""

    def __post_init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.ready = threading.Event()
        self.init_ms = 0.0
        self.idle_since = time.monotonic()
        self._read = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.environment = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self._process = self._spawn()

    @property
    def pid(self) -> int:
        return self._process.pid

    def init(self) -> Answer | None:
        """Wait until the function is loaded. None if it is, else the failure, as the first call's."""
        began = time.monotonic()
        while not self.ready.wait(_POLL_S):
            self.init_ms = (time.monotonic() - began) * 1000.0
            with contextlib.suppress(queue.Empty):
                _, body = self.answers.get_nowait()
                return self._end(Answer(body, error=True, status="error", run_ms=0.0))
            if self._process.poll() is not None:
                return self._end(self._exited("init"))
            if self.init_ms > _INIT_S * 1000.0:
                return self._end(_failed("Sandbox.Timedout", f"init: Task timed out after {_INIT_S:.2f} seconds"))
        self.init_ms = (time.monotonic() - began) * 1000.0
        return None

    def invoke(self, event: bytes, request_id: str, context: str = "") -> Answer:
        deadline = round((time.time() + self.timeout_s) * 1000.0)
        self.inbox.put(
            _Order(
                event,
                {
                    "Lambda-Runtime-Aws-Request-Id": request_id,
                    "Lambda-Runtime-Deadline-Ms": str(deadline),
                    "Lambda-Runtime-Invoked-Function-Arn": self.arn,
                    "Lambda-Runtime-Trace-Id": "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700",
                    **({"Lambda-Runtime-Client-Context": context} if context else {}),
                },
            )
        )
        began = time.monotonic()
        answer = self._wait(began, request_id)
        answer.run_ms = (time.monotonic() - began) * 1000.0
        answer.init_ms, self.init_ms = self.init_ms, 0.0
        self.idle_since = time.monotonic()
        return answer if answer.alive else self._end(answer)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.inbox.put(None)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _wait(self, began: float, request_id: str) -> Answer:
        while True:
            try:
                kind, body = self.answers.get(timeout=_POLL_S)
            except queue.Empty:
                pass
            else:
                used = self._used_mb()
                if used > self.memory_mb:
                    return self._out_of_memory(request_id)
                return Answer(body, error=kind == "error", used_mb=used, logs=self._new_logs())
            if self._process.poll() is not None and self.answers.empty():
                return self._exited(request_id)
            if self._used_mb() > self.memory_mb:
                return self._out_of_memory(request_id)
            if time.monotonic() - began > self.timeout_s:
                used = self._used_mb()
                failed = _failed(
                    "Sandbox.Timedout",
                    f"RequestId: {request_id} Error: Task timed out after {self.timeout_s:.2f} seconds",
                )
                failed.status, failed.used_mb = "timeout", used
                return failed

    def _out_of_memory(self, request_id: str) -> Answer:
        """As the kernel does it there: the process is killed."""
        failed = _failed(
            "Runtime.OutOfMemory", f"RequestId: {request_id} Error: Runtime exited with error: signal: killed"
        )
        failed.used_mb = self.memory_mb
        return failed

    def _exited(self, request_id: str) -> Answer:
        status = self._process.returncode
        how = f"exit status {status}" if status >= 0 else f"signal: {signal.Signals(-status).name.lower()}"
        reason = f"with error: {how}" if status else "without providing a reason"
        return _failed("Runtime.ExitError", f"RequestId: {request_id} Error: Runtime exited {reason}")

    def _end(self, answer: Answer) -> Answer:
        answer.init_ms = answer.init_ms or self.init_ms
        answer.alive = False
        answer.logs += self._new_logs()
        self.kill()
        return answer

    def _new_logs(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        return text.decode(errors="replace")

    def _used_mb(self) -> int:
        """Peak resident memory of the process."""
        try:
            status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
        return int(peak.split()[1]) // 1024

    def _spawn(self) -> subprocess.Popen[bytes]:
        host, port = self._server.server_address[:2]
        variables = {
            "PATH": os.defpath,
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "PYTHONPATH": f"{self.code}:{self.runtime}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LAMBDA_TASK_ROOT": str(self.code),
            "AWS_LAMBDA_RUNTIME_API": f"{host!s}:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": self.name,
            "AWS_LAMBDA_FUNCTION_VERSION": self.version,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(self.memory_mb),
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{self.name}",
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            **self.account,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_python3.{sys.version_info.minor}",
            **self.variables,
        }
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-m", "awslambdaric", self.handler],
                cwd=self.code,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # Memory that this machine allows beyond the function's limit: a jump past it is a MemoryError in the function.
        ceiling = (2 * self.memory_mb + 512) << 20
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_AS, (ceiling, ceiling))
        return process


def _failed(kind: str, message: str) -> Answer:
    payload = json.dumps({"errorType": kind, "errorMessage": message}).encode()
    return Answer(payload, error=True, alive=False, status=f"error\tError Type: {kind}")
