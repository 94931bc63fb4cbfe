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
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

from rollart.adapters.env_hosts.server import EnvironmentHostServer, load_factories, run_loop, run_on_loop
from rollart.adapters.envs.images import load_image_hook
from rollart.orphans import kill_at_end

ENVIRONMENT_HOST_TOKEN = "ROLLART_HOST_TOKEN"


async def _main(options: argparse.Namespace, ready_fd: int) -> None:
    """Run the environments' loop. The server runs on the loop of its own thread."""
    main = asyncio.get_running_loop()
    stop = asyncio.Event()
    main.add_signal_handler(signal.SIGTERM, stop.set)
    domains = json.loads(Path(options.domains).read_text())
    hook, max_bytes = (None, None) if options.images is None else load_image_hook(json.loads(options.images))
    front = EnvironmentHostServer(
        load_factories(domains),
        main,
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

    server = await run_on_loop(loop, listen())
    port = server.sockets[0].getsockname()[1]
    with os.fdopen(ready_fd, "w") as out:
        out.write(f"ready tcp://{options.host}:{port}\n")
    await stop.wait()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Output of environments goes to the log: after the ready line the pipe is not read.
    ready_fd = os.dup(1)
    os.set_inheritable(ready_fd, False)
    os.dup2(2, 1)
    faulthandler.enable()  # a crash in C names the environment's line there
    kill_at_end()  # subprocesses of environments, however the host ends
    sys.path[:0] = options.path
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(options, ready_fd))
    os._exit(0)  # without waiting for threads that hang


if __name__ == "__main__":
    main()
