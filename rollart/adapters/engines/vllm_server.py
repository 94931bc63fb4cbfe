"""`python -m rollart.adapters.engines.vllm_server --python VLLM_PYTHON --model DIR`: vLLM as one program.

Starts vLLM's API server under the interpreter of vLLM's own environment, on a free port. Prints `ready ADDRESS` on
stdout once the server answers and has its weight version set. vLLM's output goes to stderr. SIGTERM, SIGINT and the
death of the parent end this program and all of vLLM's processes; it also ends when vLLM does.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp

from rollart.lifeline import die_with_parent, stop_event, terminate
from rollart.lora import base_directory

HEALTH_POLL_S = 0.25
"""Seconds between two polls of the starting server; vLLM takes at least 20 s to start."""

STOP_S = 3.0
"""Seconds between SIGTERM and SIGKILL for vLLM; less than the same delay for this program."""

SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Address at which other engines pull KV: this server's own address, which is reachable from other nodes. Two servers
on one host need two ports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped by a signal; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollart.adapters.engines.vllm_server")
    parser.add_argument("--python", required=True, help="interpreter of the environment that vLLM is installed in")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log", default="", help="file that stderr goes to; searched for the reason of a failure")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--weight-version", default="0", help="version of --model")
    parser.add_argument("--alias", default="", help="start on this path instead, made a link to --model")
    parser.add_argument("--args", type=json.loads, default=[], help="passed on to vLLM: a list, as JSON")
    return asyncio.run(_main(parser.parse_args(argv)))


async def _main(args: argparse.Namespace) -> int:
    with socket.socket() as first, socket.socket() as second:
        first.bind((args.host, 0))
        second.bind((args.host, 0))
        # If another process takes one before vLLM does, vLLM exits and is restarted.
        port, side = first.getsockname()[1], second.getsockname()[1]
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server"]
    if args.alias:
        # A server that is starting with an older version may read this one through the same link; it is updated to the
        # current version anyway when it joins.
        link = Path(args.alias)
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f".{link.name}-{os.uname().nodename}-{os.getpid()}")
        fresh.unlink(missing_ok=True)  # left by a killed process of the same pid
        fresh.symlink_to(base_directory(args.model).resolve())
        fresh.replace(link)
    command += [
        "--host",
        args.host,
        "--port",
        str(port),
        "--model",
        args.alias or str(base_directory(args.model)),
        *args.args,
    ]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=server_environment(args.host, side, os.environ),
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        print(f"vllm: {args.python} cannot be run: {error.strerror}", file=sys.stderr)
        return 2
    stopped = stop_event()
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(process.wait(), name="the end of vllm")
        ended.add_done_callback(lambda _: stopped.set())
        ready = tasks.create_task(
            announce_ready(f"http://{args.host}:{port}", args.weight_version, args.model), name="its start"
        )
        ready.add_done_callback(lambda done: None if done.cancelled() or done.result() else stopped.set())
        await stopped.wait()
        ready.cancel()
        if process.returncode is None:
            await terminate(process, STOP_S)
            return 1 if ready.done() and not ready.result() else 0
    print(f"vllm ended with status {process.returncode}: {_failure_reason(args.log)}", file=sys.stderr)
    return 1


def server_environment(host: str, side: int, ours: Mapping[str, str]) -> dict[str, str]:
    """vLLM's environment variables. Variables that are already set, especially by `engines.vllm.env`, take
    precedence."""
    env = {**dict(zip(SIDE_CHANNEL, (host, str(side)), strict=True)), **ours, "ROLLART_VLLM_BOUND": "1"}
    env.pop("PYTHONPATH", None)  # it is for this environment, not for vLLM's
    return env


async def announce_ready(url: str, version: str, model: str) -> bool:
    """Wait until the server answers, set its weight version, then print its address. Without the version, the first
    tokens would be labelled with `default`. If `model` has an adapter, vLLM was started without it and loads it here;
    False if it cannot. Unbounded: the supervisor's lease limits the start, and `_main` ends this if vLLM ends."""
    async with aiohttp.ClientSession() as http:
        while await _status(http.get(url + "/health")) != 200:
            await asyncio.sleep(HEALTH_POLL_S)
        while (
            status := await _status(http.post(url + "/update_weight_version", json={"new_version": version}))
        ) is None:
            await asyncio.sleep(HEALTH_POLL_S)
        if base_directory(model) != Path(model):
            for route, body in (
                ("/pause?mode=abort", {}),
                ("/start_weight_update", {}),
                ("/update_weights", {"update_info": {"path": model}}),
                ("/finish_weight_update", {"weight_version": version}),
                ("/resume", {}),
            ):
                if (status := await _status(http.post(url + route, json=body))) != 200:
                    print(f"vllm: {model} cannot be loaded: {route} answers {status}", file=sys.stderr)
                    return False
    if status != 200:
        print(f"vllm: the version of its weights cannot be set: {status}", file=sys.stderr)
    print(f"ready {url}", flush=True)
    return True


async def _status(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> int | None:
    """The status of the answer; None if there is none."""
    try:
        async with request as answer:
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return None


def _failure_reason(log: str) -> str:
    """The first error in the last 400 lines of the log: vLLM's last line only refers to an error above."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-400:]
    except OSError:
        return "see its log"
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for line in lines[starts[0] :] if starts else lines[-1:]:
        text = line.rpartition("] ")[2].strip()
        if not starts or text.split(":")[0].endswith(("Error", "Exception")):
            return text[:300]
    return "see its log"


if __name__ == "__main__":
    sys.exit(main())
