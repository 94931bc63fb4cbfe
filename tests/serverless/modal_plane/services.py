"""The gRPC methods that the real client and the real container runtime call, over the plane's state."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpclib.server
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_grpc, api_pb2

from tests.serverless.modal_plane.apps import Apps, Blobs, Builds
from tests.serverless.modal_plane.containers import Container, Pool
from tests.serverless.modal_plane.state import Call, Function, State

__all__ = ["Fault", "Plane", "client_service", "container_service"]


@dataclass
class Fault:
    """The next `times` requests of a method fail so."""

    method: str
    status: str
    message: str = ""
    times: int = 1


@dataclass
class Plane:
    state: State
    pools: dict[str, Pool] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Methods whose requests are not answered yet."""
    requests: dict[str, int] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def pool(self, function_id: str) -> Pool:
        function = self.state.functions.get(function_id)
        if function is None:
            raise GRPCError(Status.NOT_FOUND, f"no function {function_id}")
        app = self.state.apps[function.app_id]
        if app.state != api_pb2.APP_STATE_DEPLOYED:
            raise GRPCError(Status.NOT_FOUND, f"app {app.name} is stopped")
        if function_id not in self.pools:
            pool = Pool(self.state, app, function, lambda container: container_service(self, container))
            self.pools[function_id] = pool
            task = asyncio.get_running_loop().create_task(pool.run())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return self.pools[function_id]

    async def close(self) -> None:
        for pool in self.pools.values():
            await pool.stop()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def client_service(plane: Plane) -> grpclib.server.IServable:
    """The control plane as clients see it: with credentials, idempotency and injected faults."""

    async def admit(name: str, metadata: Any) -> None:
        plane.requests[name] = plane.requests.get(name, 0) + 1
        given = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if given != plane.state.token:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed or unknown")
        while name in plane.held:
            await asyncio.sleep(0.01)
        for fault in plane.faults:
            if fault.method == name and fault.times > 0:
                fault.times -= 1
                raise GRPCError(Status[fault.status], fault.message)

    return _servable(
        [Apps(plane.state, plane.pools, plane.pool), Builds(plane.state), Functions(plane), Secrets(plane.state)],
        plane.state,
        admit,
    )


def container_service(plane: Plane, container: Container) -> grpclib.server.IServable:
    async def admit(name: str, metadata: Any) -> None:
        pass

    return _servable([Runtime(plane, container), Blobs(plane.state)], plane.state, admit)


def _servable(parts: list[Any], state: State, admit: Callable[[str, Any], Awaitable[None]]) -> grpclib.server.IServable:
    """A complete servicer: methods without an implementation are UNIMPLEMENTED."""

    def handler(name: str) -> Any:
        method = next((getattr(part, name) for part in parts if hasattr(part, name)), None)

        async def serve(self: Any, stream: Any) -> None:
            request = await stream.recv_message()
            await admit(name, stream.metadata)
            if method is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not part of this plane")
            key = stream.metadata.get("x-idempotency-key")
            if key is not None and key in state.answered and name in _ONCE:
                await stream.send_message(state.answered[key])
                return
            answer = method(request)
            if inspect.isasyncgen(answer):
                async for part in answer:
                    await stream.send_message(part)
                return
            if inspect.isawaitable(answer):
                answer = await answer
            if key is not None and name in _ONCE:
                state.answered[key] = answer
            await stream.send_message(answer)

        return serve

    names = api_grpc.ModalClientBase.__abstractmethods__
    made = type("Servicer", (api_grpc.ModalClientBase,), {name: handler(name) for name in names})
    return made()  # type: ignore[no-any-return]


_ONCE = frozenset({"FunctionMap", "FunctionPutInputs", "AppPublish", "AppCreate"})
"""Requests with an effect that a repetition must not have twice."""


class Secrets:
    """Named secrets and the anonymous ones of apps."""

    def __init__(self, state: State) -> None:
        self.state = state

    def SecretGetOrCreate(self, request: api_pb2.SecretGetOrCreateRequest) -> api_pb2.SecretGetOrCreateResponse:
        name = request.deployment_name
        if request.object_creation_type:
            found = self.state.secret_ids.get(name) or self.state.new_id("st")
            self.state.secrets[found] = dict(request.env_dict)
            if name:
                self.state.secret_ids[name] = found
        elif name not in self.state.secret_ids:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' not found in environment 'main'")
        else:
            found = self.state.secret_ids[name]
            if missing := set(request.required_keys) - self.state.secrets[found].keys():
                raise GRPCError(Status.FAILED_PRECONDITION, f"Secret is missing key(s): {', '.join(missing)}")
        keys = list(self.state.secrets[found])
        return api_pb2.SecretGetOrCreateResponse(
            secret_id=found, metadata=api_pb2.SecretMetadata(name=name, keys=keys, environment_name="main")
        )

    def SecretUpdate(self, request: api_pb2.SecretUpdateRequest) -> Empty:
        self.state.secrets[request.secret_id] |= {one.key: one.value for one in request.updates}
        return Empty()


class Functions:
    """Definitions, calls and the autoscaler's settings."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.state = plane.state

    def FunctionPrecreate(self, request: api_pb2.FunctionPrecreateRequest) -> api_pb2.FunctionPrecreateResponse:
        function = Function(self.state.new_id("fu"), request.app_id, request.function_name, request)
        self.state.functions[function.id] = function
        return api_pb2.FunctionPrecreateResponse(function_id=function.id, handle_metadata=function.metadata)

    def FunctionCreate(self, request: api_pb2.FunctionCreateRequest) -> api_pb2.FunctionCreateResponse:
        function = self.state.functions[request.existing_function_id]
        if request.HasField("function_data"):
            raise GRPCError(Status.UNIMPLEMENTED, "lists of GPUs are not part of this plane")
        function.definition.CopyFrom(request.function)
        function.settings.CopyFrom(request.function.autoscaler_settings)
        return api_pb2.FunctionCreateResponse(
            function_id=function.id, handle_metadata=function.metadata, function_data=function.data
        )

    def FunctionGet(self, request: api_pb2.FunctionGetRequest) -> api_pb2.FunctionGetResponse:
        app = self.state.deployed(request.app_name)
        if app is None:
            raise GRPCError(Status.NOT_FOUND, f"App '{request.app_name}' not found")
        versions = app.versions
        index = request.app_version - 1 if request.app_version else len(versions) - 1
        found = versions[index].get(request.object_tag) if 0 <= index < len(versions) else None
        if found is None:
            raise GRPCError(Status.NOT_FOUND, f"App has no function {request.object_tag} at this version")
        function = self.state.functions[found]
        return api_pb2.FunctionGetResponse(
            function_id=function.id, handle_metadata=function.metadata, function=function.data
        )

    def FunctionGetById(self, request: api_pb2.FunctionGetByIdRequest) -> api_pb2.FunctionGetByIdResponse:
        function = self.plane.pool(request.function_id).function
        return api_pb2.FunctionGetByIdResponse(function=function.data, handle_metadata=function.metadata)

    async def FunctionMap(self, request: api_pb2.FunctionMapRequest) -> api_pb2.FunctionMapResponse:
        pool = self.plane.pool(request.function_id)
        call_id, input_id = self.state.new_id("fc"), self.state.new_id("in")
        answer = api_pb2.FunctionMapResponse(
            function_call_id=call_id,
            retry_policy=pool.function.definition.retry_policy,
            function_call_jwt=call_id,
            sync_client_retries_enabled=True,
        )
        for item in request.pipelined_inputs:
            call = Call(call_id, input_id, request.function_id, item.input, request.function_call_invocation_type)
            self.state.calls[call_id] = call
            answer.pipelined_inputs.add(idx=item.idx, input_id=input_id, input_jwt=input_id)
            await pool.submit(call)
        return answer

    async def FunctionGetOutputs(
        self, request: api_pb2.FunctionGetOutputsRequest
    ) -> api_pb2.FunctionGetOutputsResponse:
        call = self.state.calls[request.function_call_id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, request.timeout)):
                await call.done.wait()
        if call.output is None:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        return api_pb2.FunctionGetOutputsResponse(outputs=[call.output])

    async def FunctionCallCancel(self, request: api_pb2.FunctionCallCancelRequest) -> Empty:
        call = self.state.calls[request.function_call_id]
        call.cancelled = True
        pool = self.plane.pool(call.function_id)
        if call in pool.pending:
            pool.pending.remove(call)
            call.finish(api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED))
        for container in pool.containers.values():
            if call.input_id in container.running:
                container.cancelled.append(call.input_id)
        return Empty()

    def FunctionGetCurrentStats(self, request: api_pb2.FunctionGetCurrentStatsRequest) -> api_pb2.FunctionStats:
        pool = self.plane.pool(request.function_id)
        running = sum(len(c.running) for c in pool.containers.values())
        return api_pb2.FunctionStats(
            backlog=len(pool.pending), num_total_tasks=len(pool.containers), num_running_inputs=running
        )

    def FunctionGetSchedulingParams(
        self, request: api_pb2.FunctionGetSchedulingParamsRequest
    ) -> api_pb2.FunctionGetSchedulingParamsResponse:
        settings = self.plane.pool(request.function_id).function.settings
        configuration = api_pb2.AutoscalerConfiguration(settings=settings)
        return api_pb2.FunctionGetSchedulingParamsResponse(autoscaler_configuration=configuration)

    async def FunctionUpdateSchedulingParams(
        self, request: api_pb2.FunctionUpdateSchedulingParamsRequest
    ) -> api_pb2.FunctionUpdateSchedulingParamsResponse:
        pool = self.plane.pool(request.function_id)
        pool.function.settings.MergeFrom(request.settings)
        await pool.kick()
        return api_pb2.FunctionUpdateSchedulingParamsResponse(current_settings=pool.function.settings)


class Runtime:
    """The service for one container, over its own socket."""

    def __init__(self, plane: Plane, container: Container) -> None:
        self.plane = plane
        self.container = container

    def ContainerHello(self, request: Empty) -> Empty:
        return Empty()

    def ContainerHeartbeat(self, request: api_pb2.ContainerHeartbeatRequest) -> api_pb2.ContainerHeartbeatResponse:
        cancelled, self.container.cancelled = self.container.cancelled, []
        event = api_pb2.CancelInputEvent(input_ids=cancelled) if cancelled else None
        return api_pb2.ContainerHeartbeatResponse(cancel_input_event=event)

    async def FunctionGetInputs(self, request: api_pb2.FunctionGetInputsRequest) -> api_pb2.FunctionGetInputsResponse:
        call = await self.container.pool.take(self.container)
        item = api_pb2.FunctionGetInputsItem(kill_switch=True)
        if call is not None:
            item = api_pb2.FunctionGetInputsItem(
                input_id=call.input_id,
                input=call.input,
                function_call_id=call.id,
                function_call_invocation_type=call.kind,  # type: ignore[arg-type]
            )
        return api_pb2.FunctionGetInputsResponse(inputs=[item])

    async def FunctionPutOutputs(self, request: api_pb2.FunctionPutOutputsRequest) -> Empty:
        for item in request.outputs:
            self.container.pool.put(self.container, item)
        return Empty()

    def FunctionGetDynamicConcurrency(self, request: Any) -> api_pb2.FunctionGetDynamicConcurrencyResponse:
        return api_pb2.FunctionGetDynamicConcurrencyResponse(concurrency=1)

    def TaskResult(self, request: api_pb2.TaskResultRequest) -> Empty:
        self.container.verdict = request.result
        return Empty()
