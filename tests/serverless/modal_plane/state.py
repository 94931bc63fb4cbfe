"""The state of the plane: apps with their deployments, functions, calls, mounts and blobs. Plain data."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import time
from dataclasses import dataclass, field

from modal_proto import api_pb2

__all__ = ["App", "Blobs", "Call", "Function", "LogEntry", "State"]


@dataclass
class LogEntry:
    t: float
    function_id: str
    task_id: str
    descriptor: int
    text: str


@dataclass
class Function:
    """One version of a function: every deployment makes a new one, with an id and containers of its own."""

    id: str
    app_id: str
    name: str
    precreated: api_pb2.FunctionPrecreateRequest
    definition: api_pb2.Function = field(default_factory=api_pb2.Function)
    settings: api_pb2.AutoscalerSettings = field(default_factory=api_pb2.AutoscalerSettings)
    """The value of the definition, until `FunctionUpdateSchedulingParams` overrides it."""

    @property
    def metadata(self) -> api_pb2.FunctionHandleMetadata:
        return api_pb2.FunctionHandleMetadata(
            app_id=self.app_id,
            function_name=self.name,
            function_type=self.precreated.function_type,
            definition_id=self.id,
            function_schema=self.precreated.function_schema,
            supported_input_formats=self.precreated.supported_input_formats,
            supported_output_formats=self.precreated.supported_output_formats,
        )

    @property
    def data(self) -> api_pb2.FunctionData:
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=self.definition)
        return api_pb2.FunctionData(
            function_name=self.name, ranked_functions=[ranked], timeout_secs=self.definition.timeout_secs
        )


@dataclass
class App:
    id: str
    name: str
    state: int
    created: float = field(default_factory=time.time)
    deployed: float = 0.0
    stopped: float = 0.0
    tags: dict[str, str] = field(default_factory=dict)
    versions: list[dict[str, str]] = field(default_factory=list)
    """Function ids by name, one dict per deployment; version numbers count from 1."""
    logs: list[LogEntry] = field(default_factory=list)

    @property
    def lifecycle(self) -> api_pb2.AppLifecycle:
        return api_pb2.AppLifecycle(
            app_state=self.state,  # type: ignore[arg-type]
            created_at=self.created,
            deployed_at=self.deployed,
            stopped_at=self.stopped,
            version=len(self.versions),
        )

    @property
    def handle(self) -> api_pb2.AppHandleMetadata:
        functions = self.versions[-1] if self.versions else {}
        return api_pb2.AppHandleMetadata(
            app_id=self.id,
            description=self.name,
            environment_name="main",
            lifecycle=self.lifecycle,
            functions=functions,
        )


@dataclass
class Call:
    """A function call of one input."""

    id: str
    input_id: str
    function_id: str
    input: api_pb2.FunctionInput
    kind: int
    cancelled: bool = False
    output: api_pb2.FunctionGetOutputsItem | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(
        self, result: api_pb2.GenericResult, *, task: str = "", data_format: int = 0, started: float = 0
    ) -> None:
        if self.output is None:
            self.output = api_pb2.FunctionGetOutputsItem(
                result=result,
                idx=0,
                input_id=self.input_id,
                data_format=data_format,  # type: ignore[arg-type]
                task_id=task,
                input_started_at=started,
                output_created_at=time.time(),
            )
            self.done.set()


@dataclass
class Blobs:
    """Bytes by id, put and fetched over HTTP at `url`."""

    url: str = ""
    content: dict[str, bytes] = field(default_factory=dict)

    def link(self, blob: str) -> str:
        return f"{self.url}/blob/{blob}"


@dataclass
class State:
    root: pathlib.Path
    token: tuple[str, str]
    apps: dict[str, App] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    mounts: dict[str, list[api_pb2.MountFile]] = field(default_factory=dict)
    images: dict[str, api_pb2.Image] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    """Variables by id."""
    secret_ids: dict[str, str] = field(default_factory=dict)
    """Ids by name."""
    files: dict[str, bytes] = field(default_factory=dict)
    blobs: Blobs = field(default_factory=Blobs)
    answered: dict[str, object] = field(default_factory=dict)
    """Answers by idempotency key: a request that the client sends again is not carried out again."""
    counter: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self.counter):022d}"

    def deployed(self, name: str) -> App | None:
        for app in self.apps.values():
            if app.name == name and app.state == api_pb2.APP_STATE_DEPLOYED:
                return app
        return None
