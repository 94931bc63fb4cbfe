"""AWS for tests, over HTTP: moto's control plane, and invocations that really run (`environment`).

moto answers all services; what it does not have is here: invoke with concurrency limits, throttles and REPORT lines,
provisioned concurrency, updates that take time, version numbers that are never used again, refused credentials.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import pathlib
import random
import re
import threading
import time
import urllib.parse
import uuid
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.awslambda.models import LambdaFunction, LambdaStorage, lambda_backends
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.logs.models import logs_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.serverless.aws.environment import Answer, Environment, runtime_path

REFUSED = "AKIAREFUSED"
"""An access key that this plane refuses."""

ROLE_KEY = "ASIAFUNCTION"
"""The access key of functions, that is of their roles."""

_FUNCTION = re.compile(r"^/(?P<api>[\d-]+)/functions/(?P<name>[^/]+)(?P<rest>/.*)?$")
_REGION = re.compile(r"Credential=(?P<key>[^/]+)/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/")
_ARCHIVES = "/archives/"
_DIRECT_BYTES = 50 * 1024 * 1024

Response = tuple[int, dict[str, str], bytes]
Start = Callable[[str, list[tuple[str, str]]], Any]


class _Request(MotoRequestHandler):
    disable_nagle_algorithm = True  # 92 ms a call without it

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class Plane:
    """The server of one test. `executions` counts invocations that a function began, `throttled` those refused;
    `reports` are the REPORT lines written. Set `account_limit`, `polls` (of an update in progress) and `failures`
    (responses to give to invocations instead, first first) and `refusals` (the same, by method and path) as a test
    needs."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self.images = root / "images"
        """Directories of container images by digest, as the tests' engine leaves them."""
        (root / "runtime").mkdir(parents=True)
        self._runtime = runtime_path(root / "runtime")
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.RLock()
        self._changing = threading.Lock()
        """Publishing compares the hash of the code and publishes it in one step, as Lambda does."""
        self._idle: dict[tuple[str, ...], list[Environment]] = defaultdict(list)
        self._busy: Counter[str] = Counter()
        self._alive: list[Environment] = []
        self._provisioned: dict[tuple[str, str], int] = {}
        self._pending: dict[str, int] = {}
        self._numbers: Counter[str] = Counter()
        self._publishing: Any = None
        self._archives: dict[str, bytes] = {}
        self.routing = random.Random(0)
        """Draws the versions of calls of aliases with weights."""
        self.account_limit = 1000
        self.polls = 0
        self.failures: list[Response] = []
        self.refusals: dict[str, list[Response]] = {}
        self.denied = 0
        """The next calls of AWS by functions to be denied."""
        self.executions: Counter[str] = Counter()
        self.throttled: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.peak = 0
        self.reports: list[str] = []
        self.calls: Counter[str] = Counter()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def busy(self) -> int:
        """Invocations that run now."""
        with self._lock:
            return self._busy.total()

    def billed_s(self) -> float:
        return sum(int(found[1]) for r in self.reports if (found := re.search(r"Billed Duration: (\d+)", r))) / 1000.0

    def pids(self) -> list[int]:
        with self._lock:
            return [one.pid for one in self._alive]

    def __enter__(self) -> Plane:
        for service in ("ecr", "iam", "s3", "logs", "lambda", "secretsmanager", "ssm"):
            get_backend(service).reset()  # type: ignore[call-overload]
        self._publishing = LambdaStorage.publish_version
        LambdaStorage.publish_version = _numbered(LambdaStorage.publish_version, self._numbers)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Request)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def unplug(self) -> None:
        """Stop answering. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *exc: object) -> None:
        self.unplug()
        LambdaStorage.publish_version = self._publishing
        with self._lock:
            alive, self._alive = self._alive, []
            self._idle.clear()
        for environment in alive:
            environment.kill()

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Iterable[bytes]:
        scope = _REGION.search(environ.get("HTTP_AUTHORIZATION", ""))
        if scope is not None and scope["key"] == REFUSED:
            return _respond(
                start_response, refusal(403, "UnrecognizedClientException", "The security token is invalid")
            )
        if scope is not None and scope["key"] == ROLE_KEY and self.denied:
            self.denied -= 1
            body = {"__type": "AccessDeniedException", "message": "The role is not authorized to perform it"}
            return _respond(start_response, (400, {}, json.dumps(body).encode()))
        if refusals := self.refusals.get(f"{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')}"):
            return _respond(start_response, refusals.pop(0))
        if environ.get("PATH_INFO", "").startswith(_ARCHIVES):
            archive = self._archives.get(environ["PATH_INFO"].removeprefix(_ARCHIVES), b"")
            return _respond(start_response, (200 if archive else 404, {"Content-Type": "application/zip"}, archive))
        path = _FUNCTION.match(environ.get("PATH_INFO", ""))
        if path is None or scope is None or scope["service"] != "lambda":
            return self._moto(environ, start_response)
        changes = environ["REQUEST_METHOD"] in ("PUT", "POST") and path["rest"] in (
            "/code",
            "/configuration",
            "/versions",
        )
        with self._changing if changes else contextlib.nullcontext():
            return self._answer(environ, path, scope["region"], start_response)

    def _answer(
        self, environ: dict[str, Any], path: re.Match[str], region: str, start_response: Start
    ) -> Iterable[bytes]:
        response = self._function(environ, path, region)
        if response is not None:
            return _respond(start_response, response)
        name = urllib.parse.unquote(path["name"])
        changes = environ["REQUEST_METHOD"] in ("PUT", "POST") and path["rest"] in ("/code", "/configuration")
        if (
            environ["REQUEST_METHOD"] == "GET"
            and path["rest"] is None
            and "Qualifier" in environ.get("QUERY_STRING", "")
        ):
            return _respond(start_response, self._with_location(environ, name, region))
        if self.polls and environ["REQUEST_METHOD"] == "GET" and path["rest"] in (None, "", "/configuration"):
            return _patched(self._moto(environ, start_response), start_response, self._status(name))
        if self.polls and changes:
            self._pending[name] = self.polls
        return self._moto(environ, start_response)

    def _with_location(self, environ: dict[str, Any], name: str, region: str) -> Response:
        """moto's `GetFunction`, with an address of the archive that answers."""
        head: list[Any] = []
        chunks = self._moto(environ, lambda status, headers, error=None: head.extend((status, headers)))
        status, body = int(str(head[0]).split()[0]), b"".join(chunks)
        if status == 200:
            qualifier = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"]))["Qualifier"]
            function = lambda_backends[DEFAULT_ACCOUNT_ID][region].get_function(name, qualifier)
            self._archives[function.code_sha_256] = function.code_bytes
            answer = json.loads(body)
            answer["Code"] = {
                "RepositoryType": "S3",
                "Location": f"{self.url}{_ARCHIVES}{urllib.parse.quote(function.code_sha_256, safe='')}",
            }
            body = json.dumps(answer).encode()
        return status, {k: v for k, v in head[1] if k.lower() != "content-length"}, body

    def _function(self, environ: dict[str, Any], path: re.Match[str], region: str) -> Response | None:
        """Our answer, or None for moto's."""
        name, rest, method = urllib.parse.unquote(path["name"]), path["rest"] or "", environ["REQUEST_METHOD"]
        query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
        self.calls[f"{method} {rest}"] += 1
        if method == "PUT" and rest.startswith("/aliases/"):
            return self._alias_refused(name, rest.removeprefix("/aliases/"), _peek(environ), region)
        if method == "POST" and rest == "/invocations":
            return self._invocation(name, query.get("Qualifier", "$LATEST"), _body(environ), _context(environ), region)
        if rest == "/provisioned-concurrency":
            return self._provision(method, name, query["Qualifier"], environ, region)
        changes = (method, rest) in (("PUT", "/code"), ("PUT", "/configuration"), ("POST", "/versions"))
        if changes and self._pending.get(name, 0):
            message = "The operation cannot be performed at this time. An update is in progress for resource"
            return refusal(409, "ResourceConflictException", message)
        if method == "PUT" and rest == "/code":
            archive = base64.b64decode(_peek(environ).get("ZipFile") or "")
            if len(archive) > _DIRECT_BYTES:
                return refusal(413, "RequestEntityTooLargeException", "the archive is too large")
        if method == "POST" and rest == "/versions" and (sha := _peek(environ).get("CodeSha256")):
            found = lambda_backends[DEFAULT_ACCOUNT_ID][region].get_function(name)
            if found.code_sha_256 != sha:
                return refusal(400, "InvalidParameterValueException", "CodeSHA256 is different from that of $LATEST")
        return None

    def _alias_refused(self, name: str, alias: str, asked: dict[str, Any], region: str) -> Response | None:
        """Lambda's rules for weights, which moto lacks: a revision that is still the alias's own, and no provisioned
        concurrency."""
        found = lambda_backends[DEFAULT_ACCOUNT_ID][region]._lambdas._get_function_aliases(name).get(alias)
        if found is None:
            return None
        if asked.get("RevisionId", found.revision_id) != found.revision_id:
            message = "The RevisionId provided does not match the latest RevisionId"
            return refusal(412, "PreconditionFailedException", message)
        if _weights(asked.get("RoutingConfig")) and (name, alias) in self._provisioned:
            message = "Alias with weights can not be used with Provisioned Concurrency"
            return refusal(400, "InvalidParameterValueException", message)
        found.revision_id = str(uuid.uuid4())
        return None

    def _routed(self, name: str, qualifier: str, region: str) -> str:
        """The version that a call of an alias with weights goes to."""
        aliases = lambda_backends[DEFAULT_ACCOUNT_ID][region]._lambdas._get_function_aliases(name)
        weights = _weights(aliases[qualifier].routing_config) if qualifier in aliases else {}
        for version, weight in weights.items():
            if self.routing.random() < weight:
                return version
        return qualifier

    def _invocation(self, name: str, qualifier: str, event: bytes, context: str, region: str) -> Response:
        backend = lambda_backends[DEFAULT_ACCOUNT_ID][region]
        with self._lock:
            if self.failures:
                return self.failures.pop(0)
        if len(event) > 6_291_456:
            return refusal(413, "RequestTooLargeException", "Request must be smaller than 6291456 bytes")
        try:
            function = backend.get_function(name, self._routed(name, qualifier, region))
            reserved = backend.get_function(name).reserved_concurrency
        except Exception as error:
            return refusal(404, "ResourceNotFoundException", str(error))
        with self._lock:
            refused = self._refused(name, reserved)
            if refused is not None:
                self.throttled[name] += 1
                return refused
            self._busy[name] += 1
            self.executions[name] += 1
            self.peak = max(self.peak, self._busy.total())
        try:
            return self._execute(function, event, context, region)
        finally:
            with self._lock:
                self._busy[name] -= 1

    def _refused(self, name: str, reserved: Any) -> Response | None:
        reason = ""
        if reserved is not None and self._busy[name] >= int(reserved):
            reason = "ReservedFunctionConcurrentInvocationLimitExceeded"
        elif self._busy.total() >= self.account_limit:
            reason = "ConcurrentInvocationLimitExceeded"
        return throttle(reason) if reason else None

    def _execute(self, function: LambdaFunction, event: bytes, context: str, region: str) -> Response:
        request_id = str(uuid.uuid4())
        key = (function.function_arn, function.code_sha_256, str(function.memory_size), str(function.timeout))
        with self._lock:
            environment = self._idle[key].pop() if self._idle[key] else None
        answer = None
        if environment is None:
            environment = self._start(function)
            answer = environment.init()
        if answer is None:
            answer = environment.invoke(event, request_id, context)
        with self._lock:
            if answer.alive:
                self._idle[key].append(environment)
            elif environment in self._alive:
                self._alive.remove(environment)
        lines = self._report(function, answer, request_id)
        self._keep_logs(function, lines, region)
        payload = answer.payload
        headers = {
            "Content-Type": "application/json",
            "x-amzn-RequestId": request_id,
            "X-Amz-Executed-Version": str(function.version),
            "X-Amz-Log-Result": base64.b64encode("".join(lines).encode()[-4096:]).decode(),
        }
        if len(payload) > 6_291_556:
            error = {"errorType": "Function.ResponseSizeTooLarge", "errorMessage": "Response payload size exceeded"}
            payload, answer.error = json.dumps(error).encode(), True
        if answer.error:
            headers["X-Amz-Function-Error"] = "Unhandled"
        return 200, headers, payload

    def _start(self, function: LambdaFunction) -> Environment:
        image = function.package_type == "Image"
        code = self._root / "code" / hashlib.sha256(b"" if image else function.code_bytes).hexdigest()
        handler = function.handler
        if image:
            code = self.images / function.code_sha_256 / "var/task"
            (handler,) = json.loads((code.parents[1] / "command.json").read_text())
        with self._lock:
            if not code.exists():
                with zipfile.ZipFile(io.BytesIO(function.code_bytes)) as archive:
                    archive.extractall(code)
            self.starts[function.function_name] += 1
            environment = Environment(
                code=code,
                runtime=self._runtime,
                log=self._root / f"{uuid.uuid4()}.log",
                name=function.function_name,
                version=str(function.version),
                arn=function.function_arn,
                handler=handler,
                memory_mb=function.memory_size,
                timeout_s=function.timeout,
                variables=dict(function.environment_vars),
                account={
                    "AWS_REGION": str(function.region),
                    "AWS_DEFAULT_REGION": str(function.region),
                    "AWS_ACCESS_KEY_ID": ROLE_KEY,
                    "AWS_SECRET_ACCESS_KEY": "secret",
                    "AWS_ENDPOINT_URL": self.url,
                },
            )
            self._alive.append(environment)
        return environment

    def _report(self, function: LambdaFunction, answer: Answer, request_id: str) -> list[str]:
        line = (
            f"REPORT RequestId: {request_id}\tDuration: {answer.run_ms:.2f} ms\t"
            f"Billed Duration: {answer.billed_ms} ms\tMemory Size: {function.memory_size} MB\t"
            f"Max Memory Used: {answer.used_mb} MB\t"
        )
        if answer.init_ms:
            line += f"Init Duration: {answer.init_ms:.2f} ms\t"
        if answer.status:
            line += f"Status: {answer.status}"
        with self._lock:
            self.reports.append(line)
        logs = answer.logs if answer.logs.endswith("\n") or not answer.logs else answer.logs + "\n"
        return [
            f"START RequestId: {request_id} Version: {function.version}\n",
            logs,
            f"END RequestId: {request_id}\n",
            line + "\n",
        ]

    def _keep_logs(self, function: LambdaFunction, lines: list[str], region: str) -> None:
        logs = logs_backends[DEFAULT_ACCOUNT_ID][region]
        stream = f"{time.strftime('%Y/%m/%d')}/[{function.version}]{uuid.uuid4().hex}"
        group = f"/aws/lambda/{function.function_name}"
        events = [{"timestamp": round(time.time() * 1000), "message": m} for t in lines for m in t.splitlines()]
        with self._lock:
            if group not in logs.groups:
                return
            logs.create_log_stream(group, stream)
            logs.put_log_events(group, stream, events[:1000])

    def _provision(self, method: str, name: str, qualifier: str, environ: dict[str, Any], region: str) -> Response:
        key = (name, qualifier)
        if method == "PUT":
            aliases = lambda_backends[DEFAULT_ACCOUNT_ID][region]._lambdas._get_function_aliases(name)
            if qualifier in aliases and _weights(aliases[qualifier].routing_config):
                message = "Alias with weights can not be used with Provisioned Concurrency"
                return refusal(400, "InvalidParameterValueException", message)
            count = int(json.loads(_body(environ))["ProvisionedConcurrentExecutions"])
            self._provisioned[key] = count
            function = lambda_backends[DEFAULT_ACCOUNT_ID][region].get_function(name, qualifier)
            for _ in range(count):
                environment = self._start(function)
                if environment.init() is None:
                    environment.init_ms = 0.0
                    idle = (function.function_arn, function.code_sha_256)
                    with self._lock:
                        self._idle[(*idle, str(function.memory_size), str(function.timeout))].append(environment)
        elif key not in self._provisioned:
            return refusal(404, "ProvisionedConcurrencyConfigNotFoundException", "No Provisioned Concurrency Config")
        elif method == "DELETE":
            del self._provisioned[key]
            return 204, {}, b""
        count = self._provisioned[key]
        body = {
            "RequestedProvisionedConcurrentExecutions": count,
            "AvailableProvisionedConcurrentExecutions": count,
            "AllocatedProvisionedConcurrentExecutions": count,
            "Status": "READY",
        }
        return 202 if method == "PUT" else 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _status(self, name: str) -> str:
        left = self._pending.get(name, 0)
        self._pending[name] = max(0, left - 1)
        return "InProgress" if left else "Successful"


@contextlib.contextmanager
def serving(root: pathlib.Path) -> Iterator[Plane]:
    with Plane(root) as plane:
        yield plane


def throttle(reason: str, retry_after_s: int | None = None) -> Response:
    """The API's 429, with its reason."""
    body = {"Type": "User", "message": "Rate Exceeded.", "Reason": reason}
    headers = {"Content-Type": "application/json", "x-amzn-ErrorType": "TooManyRequestsException"}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return 429, headers, json.dumps(body).encode()


def refusal(status: int, kind: str, message: str) -> Response:
    body = json.dumps({"Type": "User", "message": message, "Message": message}).encode()
    return status, {"Content-Type": "application/json", "x-amzn-ErrorType": kind}, body


def _respond(start_response: Start, response: Response) -> Iterable[bytes]:
    status, headers, body = response
    start_response(f"{status} -", [*headers.items(), ("Content-Length", str(len(body)))])
    return [body]


def _context(environ: dict[str, Any]) -> str:
    """The client context of an invocation, as JSON; '' if there is none."""
    return base64.b64decode(environ.get("HTTP_X_AMZ_CLIENT_CONTEXT", "")).decode()


def _weights(routing: Any) -> dict[str, float]:
    return dict((routing or {}).get("AdditionalVersionWeights") or {})


def _body(environ: dict[str, Any]) -> bytes:
    data: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return data


def _peek(environ: dict[str, Any]) -> dict[str, Any]:
    """The JSON body, left in place for moto."""
    data = _body(environ)
    environ["wsgi.input"] = io.BytesIO(data)
    found: dict[str, Any] = json.loads(data or b"{}")
    return found


def _patched(chunks: Iterable[bytes], start_response: Start, status: str) -> Iterable[bytes]:
    """moto's answer with another `LastUpdateStatus`; JSON keeps its length by padding."""
    data = b"".join(chunks)
    return [data.replace(b'"Successful"', json.dumps(status).encode().ljust(12))]


def _numbered(publish: Any, numbers: Counter[str]) -> Any:
    """moto numbers a version by how many there are, Lambda by how many there ever were; and where neither code nor
    configuration differ from the last version's, Lambda publishes none."""

    def publish_version(self: LambdaStorage, name_or_arn: str, description: str = "") -> Any:
        latest, *published = self.list_versions_by_function(name_or_arn)
        if published and _content(published[-1]) == _content(latest):
            return published[-1]
        latest = self.get_function_by_name_or_arn_forbid_qualifier(name_or_arn)
        latest.code_or_config_updated = True
        made = publish(self, name_or_arn, description)
        numbers[made.function_name] += 1
        made.set_version(numbers[made.function_name])
        return made

    return publish_version


def _content(one: LambdaFunction) -> tuple[Any, ...]:
    return one.code_sha_256, one.memory_size, one.timeout, one.handler, one.run_time, one.role, one.environment_vars
