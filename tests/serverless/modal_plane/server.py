"""The plane as a program: `python -m tests.serverless.modal_plane.server DIR TOKEN_ID TOKEN_SECRET`.

Prints one line of JSON, `{"server_url", "http_url"}`, serves until SIGTERM, and leaves no container behind. Beside the
blobs, its HTTP port has `GET /state`, `POST /fault` and `POST /held` for tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import signal
import socket
import sys

import grpclib.server
from aiohttp import web

from tests.serverless.modal_plane.services import Fault, Plane, client_service
from tests.serverless.modal_plane.state import State


async def serve(root: pathlib.Path, token: tuple[str, str]) -> None:
    plane = Plane(State(root, token))
    runner = web.AppRunner(_http(plane))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    plane.state.blobs.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    server = grpclib.server.Server([client_service(plane)])
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(sock=listener)
    port = listener.getsockname()[1]
    print(json.dumps({"server_url": f"http://127.0.0.1:{port}", "http_url": plane.state.blobs.url}), flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    server.close()
    await plane.close()
    await runner.cleanup()


def _http(plane: Plane) -> web.Application:
    blobs = plane.state.blobs.content

    async def put(request: web.Request) -> web.Response:
        data = blobs[request.match_info["id"]] = await request.read()
        return web.Response(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    async def get(request: web.Request) -> web.Response:
        return web.Response(body=blobs[request.match_info["id"]])

    async def state(request: web.Request) -> web.Response:
        pools = [
            {
                "app": p.app.name,
                "function": p.function.id,
                "name": p.function.name,
                "version": next((n for n, v in enumerate(p.app.versions, 1) if p.function.id in v.values()), 0),
                "starts": p.starts,
                "pending": len(p.pending),
                "containers": [c.process.pid for c in p.containers.values() if c.process is not None],
                "running": sum(len(c.running) for c in p.containers.values()),
                "memory_mb": p.function.definition.resources.memory_mb,
                "memory_mb_max": p.function.definition.resources.memory_mb_max,
                "milli_cpu": p.function.definition.resources.milli_cpu,
                "gpu": p.function.definition.resources.gpu_config.gpu_type,
                "timeout_secs": p.function.definition.timeout_secs,
                "block_network": p.function.definition.block_network,
                "restricted": p.function.definition.untrusted,
                "single_use": p.function.definition.single_use_containers,
                "concurrent": p.function.definition.max_concurrent_inputs,
                "retries": p.function.definition.retry_policy.retries,
                "layers": [c for image in plane.state.images.values() for c in image.dockerfile_commands],
                "image": [
                    c for i in [plane.state.images[p.function.definition.image_id]] for c in i.dockerfile_commands
                ],
            }
            for p in plane.pools.values()
        ]
        calls = [
            {"data_format": c.input.data_format, "bytes": len(c.input.args), "blob": bool(c.input.args_blob_id)}
            for c in plane.state.calls.values()
        ]
        return web.json_response({"pools": pools, "calls": calls, "requests": plane.requests})

    async def fault(request: web.Request) -> web.Response:
        plane.faults.append(Fault(**await request.json()))
        return web.Response()

    async def held(request: web.Request) -> web.Response:
        plane.held = set(await request.json())
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.put("/blob/{id}", put), web.get("/blob/{id}", get)])
    app.add_routes([web.get("/state", state), web.post("/fault", fault), web.post("/held", held)])
    return app


if __name__ == "__main__":
    asyncio.run(serve(pathlib.Path(sys.argv[1]), (sys.argv[2], sys.argv[3])))
