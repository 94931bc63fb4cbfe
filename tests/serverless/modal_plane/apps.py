"""Apps, images, mounts and blobs: the gRPC methods of a deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from tests.serverless.modal_plane.containers import Pool
from tests.serverless.modal_plane.state import App, State

__all__ = ["Apps", "Blobs", "Builds"]

RATES = {"cpu_core_second": "0.0000131", "memory_gib_second": "0.00000222", "gpu_l4_second": "0.000222"}
"""Names and values in the shape of the workspace's price list; the numbers are a dated copy, not Modal's answer."""


class Blobs:
    def __init__(self, state: State) -> None:
        self.state = state

    def BlobCreate(self, request: api_pb2.BlobCreateRequest) -> api_pb2.BlobCreateResponse:
        blob = self.state.new_id("bl")
        urls = api_pb2.UploadUrlList(items=[self.state.blobs.link(blob)])
        return api_pb2.BlobCreateResponse(blob_ids=[blob], upload_urls=urls)

    def BlobGet(self, request: api_pb2.BlobGetRequest) -> api_pb2.BlobGetResponse:
        return api_pb2.BlobGetResponse(download_url=self.state.blobs.link(request.blob_id))


class Builds(Blobs):
    """Images are not built: containers have this interpreter's packages. Mounts are kept file by file."""

    def ImageGetOrCreate(self, request: api_pb2.ImageGetOrCreateRequest) -> api_pb2.ImageGetOrCreateResponse:
        image_id = self.state.new_id("im")
        self.state.images[image_id] = request.image
        result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = api_pb2.ImageMetadata(image_builder_version=request.builder_version)
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=result, metadata=metadata)

    def MountBatchedCheckExistence(
        self, request: api_pb2.MountBatchedCheckExistenceRequest
    ) -> api_pb2.MountBatchedCheckExistenceResponse:
        missing = [h for h in request.sha256_hex_hashes if h not in self.state.files]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountPutFile(self, request: api_pb2.MountPutFileRequest) -> api_pb2.MountPutFileResponse:
        blob = request.data_blob_id
        self.state.files[request.sha256_hex] = self.state.blobs.content[blob] if blob else request.data
        return api_pb2.MountPutFileResponse(exists=True)

    def MountGetOrCreate(self, request: api_pb2.MountGetOrCreateRequest) -> api_pb2.MountGetOrCreateResponse:
        mount = self.state.new_id("mo")
        self.state.mounts[mount] = list(request.files)
        metadata = api_pb2.MountHandleMetadata(content_checksum_sha256_hex=mount)
        return api_pb2.MountGetOrCreateResponse(mount_id=mount, handle_metadata=metadata)


class Apps:
    """`pool` returns a function's containers, `pools` the existing ones."""

    def __init__(self, state: State, pools: dict[str, Pool], pool: Callable[[str], Pool]) -> None:
        self.state = state
        self.pools = pools
        self.pool = pool

    def ClientHello(self, request: Empty) -> api_pb2.ClientHelloResponse:
        return api_pb2.ClientHelloResponse()

    def AuthTokenGet(self, request: api_pb2.AuthTokenGetRequest) -> api_pb2.AuthTokenGetResponse:
        return api_pb2.AuthTokenGetResponse(token="")

    def EnvironmentGetOrCreate(
        self, request: api_pb2.EnvironmentGetOrCreateRequest
    ) -> api_pb2.EnvironmentGetOrCreateResponse:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def WorkspaceNameLookup(self, request: Empty) -> api_pb2.WorkspaceNameLookupResponse:
        return api_pb2.WorkspaceNameLookupResponse(workspace_name="plane", username="plane")

    def WorkspaceBillingRates(self, request: Any) -> api_pb2.WorkspaceBillingRatesResponse:
        return api_pb2.WorkspaceBillingRatesResponse(rates=RATES)

    def AppGetByDeploymentName(
        self, request: api_pb2.AppGetByDeploymentNameRequest
    ) -> api_pb2.AppGetByDeploymentNameResponse:
        app = self.state.deployed(request.name)
        return api_pb2.AppGetByDeploymentNameResponse(app_id=app.id if app else "", environment_name="main")

    def AppCreate(self, request: api_pb2.AppCreateRequest) -> api_pb2.AppCreateResponse:
        app = App(self.state.new_id("ap"), request.description, request.app_state, tags=dict(request.tags))
        self.state.apps[app.id] = app
        return api_pb2.AppCreateResponse(app_id=app.id)

    def AppGetOrCreate(self, request: api_pb2.AppGetOrCreateRequest) -> api_pb2.AppGetOrCreateResponse:
        app = self.state.deployed(request.app_name)
        if app is None:
            raise GRPCError(Status.NOT_FOUND, f"App '{request.app_name}' not found in environment 'main'")
        return api_pb2.AppGetOrCreateResponse(app_id=app.id, handle_metadata=app.handle)

    def AppGetLayout(self, request: api_pb2.AppGetLayoutRequest) -> api_pb2.AppGetLayoutResponse:
        app = self._app(request.app_id)
        ids = app.versions[-1] if app.versions else {}
        objects = [
            api_pb2.Object(object_id=f, function_handle_metadata=self.state.functions[f].metadata) for f in ids.values()
        ]
        return api_pb2.AppGetLayoutResponse(app_layout=api_pb2.AppLayout(objects=objects, function_ids=ids))

    async def AppPublish(self, request: api_pb2.AppPublishRequest) -> api_pb2.AppPublishResponse:
        app = self._app(request.app_id)
        app.name = request.name or app.name
        app.state, app.deployed = api_pb2.APP_STATE_DEPLOYED, time.time()
        app.tags = dict(request.tags)
        app.versions.append(dict(request.function_ids))
        for name, function_id in request.function_ids.items():
            self.state.functions[function_id].name = name
            await self.pool(function_id).kick()
        return api_pb2.AppPublishResponse(url="http://plane.invalid/app", deployed_at=app.deployed)

    def AppHeartbeat(self, request: api_pb2.AppHeartbeatRequest) -> Empty:
        return Empty()

    def AppClientDisconnect(self, request: api_pb2.AppClientDisconnectRequest) -> Empty:
        return Empty()

    async def AppStop(self, request: api_pb2.AppStopRequest) -> Empty:
        app = self._app(request.app_id)
        app.state, app.stopped = api_pb2.APP_STATE_STOPPED, time.time()
        for pool in [p for p in self.pools.values() if p.app is app]:
            await pool.stop()
        return Empty()

    def AppList(self, request: api_pb2.AppListRequest) -> api_pb2.AppListResponse:
        item = api_pb2.AppListResponse.AppListItem
        return api_pb2.AppListResponse(
            apps=[
                item(
                    app_id=a.id,
                    name=a.name,
                    description=a.name,
                    state=a.state,  # type: ignore[arg-type]
                    metadata=a.handle,
                )
                for a in self.state.apps.values()
            ]
        )

    def AppGetInfo(self, request: api_pb2.AppGetInfoRequest) -> api_pb2.AppGetInfoResponse:
        return api_pb2.AppGetInfoResponse(info=self._app(request.app_id).handle)

    def AppGetTags(self, request: api_pb2.AppGetTagsRequest) -> api_pb2.AppGetTagsResponse:
        return api_pb2.AppGetTagsResponse(tags=self._app(request.app_id).tags)

    def AppSetTags(self, request: api_pb2.AppSetTagsRequest) -> Empty:
        self._app(request.app_id).tags = dict(request.tags)
        return Empty()

    def AppCountLogs(self, request: api_pb2.AppCountLogsRequest) -> api_pb2.AppCountLogsResponse:
        buckets: dict[int, int] = {}
        for entry in self._logs(request):
            start = int(entry.t // request.bucket_secs * request.bucket_secs)
            buckets[start] = buckets.get(start, 0) + 1
        answer = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        for start, count in sorted(buckets.items()):
            bucket = answer.buckets.add(stdout_logs=count)
            bucket.bucket_start_at.FromSeconds(start)
        return answer

    def AppFetchLogs(self, request: api_pb2.AppFetchLogsRequest) -> api_pb2.AppFetchLogsResponse:
        answer = api_pb2.AppFetchLogsResponse()
        found = self._logs(request)
        for entry in found[-request.limit :] if request.limit else found:
            batch = answer.batches.add(task_id=entry.task_id, function_id=entry.function_id)
            batch.items.add(
                data=entry.text,
                timestamp=entry.t,
                file_descriptor=entry.descriptor,  # type: ignore[arg-type]
            )
        return answer

    async def AppGetLogs(self, request: api_pb2.AppGetLogsRequest) -> AsyncIterator[api_pb2.TaskLogsBatch]:
        """New entries, from the one after `last_entry_id` on, until the request's time has passed."""
        logs = self._app(request.app_id).logs
        position = int(request.last_entry_id or len(logs))
        ends = asyncio.get_running_loop().time() + request.timeout
        while asyncio.get_running_loop().time() < ends:
            for entry in logs[position:]:
                position += 1
                batch = api_pb2.TaskLogsBatch(
                    task_id=entry.task_id, function_id=entry.function_id, entry_id=str(position)
                )
                batch.items.add(data=entry.text, timestamp=entry.t, file_descriptor=entry.descriptor)
                yield batch
            await asyncio.sleep(0.02)

    def _logs(self, request: Any) -> list[Any]:
        since, until = request.since.ToNanoseconds() / 1e9, request.until.ToNanoseconds() / 1e9
        return [
            e
            for e in self._app(request.app_id).logs
            if since <= e.t < until and request.function_id in ("", e.function_id)
        ]

    def _app(self, app_id: str) -> App:
        try:
            return self.state.apps[app_id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"no app {app_id}") from None
