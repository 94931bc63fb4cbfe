"""An environment host: a program that runs hundreds of episodes and serves their calls over a socket.

`python -m rollart.adapters.env_hosts.host --domains FILE [--path DIR] [--host ADDRESS] [--port N]` prints `ready
tcp://ADDRESS:PORT`. The file defines the domains (`{name: {"environment": "package.module:Class", "arguments":
{...}}}`); a request names one of them and can make nothing else. A client must greet the host with the token in the
variable ROLLART_HOST_TOKEN.

Environments run on the loop of the main thread, one call of each at a time. An environment whose class sets `blocking =
True` has a thread and a loop of its own and blocks no other. The socket and the health check use a third thread: a host
whose environments block the main loop reports the call that blocks it.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import sys
import threading
from pathlib import Path

from rollart.adapters.env_hosts.server import EnvironmentHostServer, load_factories, run_loop, run_on_loop
from rollart.adapters.envs.images import load_image_hook
from rollart.orphans import kill_at_end
from serverless.hosts import Serving, run_host

ENVIRONMENT_HOST_TOKEN = "ROLLART_HOST_TOKEN"


async def _serve(options: argparse.Namespace, serving: Serving) -> None:
    """Run the environments' loop. The server runs on the loop of its own thread."""
    domains = json.loads(Path(options.domains).read_text())
    hook, max_bytes = (None, None) if options.images is None else load_image_hook(json.loads(options.images))
    front = EnvironmentHostServer(
        load_factories(domains),
        asyncio.get_running_loop(),
        os.environ.pop(ENVIRONMENT_HOST_TOKEN, ""),
        options.warm,
        options.reuse,
        hook=hook,
        max_image_bytes=max_bytes,
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=run_loop, args=(loop,), name="front", daemon=True).start()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(front.serve, options.host, options.port)

    await serving(options.host, await run_on_loop(loop, listen()))
    await run_on_loop(loop, front.close())


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollart.adapters.env_hosts.host")
    parser.add_argument("--domains", required=True)
    parser.add_argument("--path", action="append", default=[], help="a further directory to import environments from")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--warm", type=int, default=0, help="environments of each domain that are made ahead")
    parser.add_argument("--reuse", type=int, default=1, help="episodes that an environment plays, if it is reusable")
    parser.add_argument("--images", help="the image hook as JSON: hook, arguments, bytes")
    options = parser.parse_args()
    faulthandler.enable()  # a crash in C names the environment's line in the log
    kill_at_end()  # subprocesses of environments, however the host ends
    sys.path[:0] = options.path
    run_host(lambda serving: _serve(options, serving))
    os._exit(0)  # without waiting for threads that hang


if __name__ == "__main__":
    main()
