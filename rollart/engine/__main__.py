"""`python -m rollart.engine --model DIR`: one inference server per process.

Prints `ready http://host:port` on stdout once it answers. A failed start prints one line on stderr and exits with 2.
SIGTERM, SIGINT and the death of the parent end the process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import traceback
from collections.abc import Sequence

import torch
from aiohttp import web

from rollart.architecture import read_architecture
from rollart.engine.driver import Driver
from rollart.engine.handoff import DTYPES, HandoffSettings
from rollart.engine.network import Network
from rollart.engine.runner import STEP_TOKENS, Runner
from rollart.engine.server import EngineServer
from rollart.engine.shm import SHM_BASE
from rollart.engine.weights import published_version, read_stacked
from rollart.errors import RollartError, UsageError, first_line
from rollart.lifeline import die_with_parent, stop_event

SHUTDOWN_S = 2.0
"""Time limit for open connections to end after SIGTERM, seconds."""

MEMORY_REMEDY = "lower --max-slots (engines.max_slots) or --max-context (model.context): KV takes their product"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped by a signal; returns the exit code."""
    args = parse_arguments(argv)
    if not args.detached:
        die_with_parent(os.getppid(), code=0)  # a killed controller leaves no engine behind
    try:
        torch.set_num_threads(args.threads)
        runner = load(args)
        if runner.decoder is not None and runner.decoder.why:
            print(f"rollart.engine: decoding is slower than it could be: {runner.decoder.why}", file=sys.stderr)
        asyncio.run(serve_runner(runner, args))
    except RollartError as error:
        print(f"rollart.engine: {error}", file=sys.stderr)
        return error.exit_code
    except ExceptionGroup as group:  # a step failed: its requests got errors, the supervisor decides on a restart
        if isinstance(cause := group.exceptions[0], torch.OutOfMemoryError):
            print(f"rollart.engine: a step found no memory: {first_line(cause)} ({MEMORY_REMEDY})", file=sys.stderr)
            return 1
        traceback.print_exception(group)
        print(f"rollart.engine: stopped by {group.exceptions[0]!r}", file=sys.stderr)
        return 1
    return 0


def load(args: argparse.Namespace) -> Runner:
    """The runner for these arguments. UsageError for a missing model or device."""
    architecture = read_architecture(args.model)
    try:
        device = torch.device(args.device)
        if device.index:
            raise UsageError(
                f"device {args.device} is not the first (rule: an engine has the first GPU that it sees)",
                remedy=f"CUDA_VISIBLE_DEVICES={device.index} and --device {device.type}",
            )
        network = Network(architecture, context=args.max_context, device=device, dtype=DTYPES[args.dtype])
        weights = read_stacked(network, args.model)
        network.load(weights.tensors, weights.adapters)
        version = published_version(args.model) if args.weight_version is None else args.weight_version
        runner = Runner(
            network,
            slots=args.max_slots,
            context=args.max_context,
            version=version,
            stamp=weights.stamp,
            step_tokens=args.max_step_tokens,
            deterministic=args.deterministic,
        )
        if runner.decoder is not None:
            runner.decoder.prepare()
        return runner
    except (RuntimeError, AssertionError) as error:  # torch: unknown or absent device, out of memory
        remedy = (
            MEMORY_REMEDY if isinstance(error, torch.OutOfMemoryError) else "check --device, --max-slots, --max-context"
        )
        raise UsageError(f"cannot start on {args.device}: {first_line(error)}", remedy=remedy) from error


async def serve_runner(runner: Runner, args: argparse.Namespace) -> None:
    stop = stop_event()
    driver = Driver(runner, threads=args.threads)
    handoff = HandoffSettings(
        lease_s=args.kv_lease_s,
        return_lease_s=args.kv_return_lease_s,
        timeout_s=args.kv_timeout_s,
        pending_bytes=int(args.kv_pending_mb * 2**20),
        shm=args.kv_shm,
    )
    server = EngineServer(driver, model=args.model, handoff=handoff)
    web_runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, keepalive_timeout=3600.0
    )
    await web_runner.setup()
    try:
        try:
            await web.TCPSite(web_runner, args.host, args.port, backlog=1024).start()
        except OSError as error:
            message = f"cannot listen on {args.host}:{args.port}: {os.strerror(error.errno or 0)}"
            raise UsageError(message, remedy="use --port 0 for a free one") from error
        port = web_runner.addresses[0][1]
        server.handoffs.advertise = (args.advertise_host or args.host, port)
        listener = await server.listen(args.host)
        async with listener, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(driver.run()), tasks.create_task(server.handoffs.run())
            print(f"ready http://{args.host}:{port}", flush=True)
            await stop.wait()
            for task in running:
                task.cancel()
    finally:
        await web_runner.cleanup()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollart.engine", description="The embedded inference server.")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed")
    parser.add_argument("--advertise-host", default="", help="where other engines reach this one (default: --host)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--max-slots", type=int, default=64, help="active requests and idle sessions")
    parser.add_argument("--max-context", type=int, default=256, help="tokens per slot")
    parser.add_argument("--max-step-tokens", type=int, default=STEP_TOKENS, help="new prompt tokens per step")
    parser.add_argument("--deterministic", action="store_true", help="compute each sequence alone")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of an operator")
    parser.add_argument("--weight-version", type=int, help="version of --model (default: its marker's, or 0)")
    defaults = HandoffSettings()
    parser.add_argument("--kv-lease-s", type=float, default=defaults.lease_s, help="how long a prompt's KV waits")
    parser.add_argument(
        "--kv-return-lease-s", type=float, default=defaults.return_lease_s, help="how long KV waits for the next turn"
    )
    parser.add_argument("--kv-timeout-s", type=float, default=defaults.timeout_s, help="longest KV pull")
    parser.add_argument("--kv-pending-mb", type=float, default=defaults.pending_bytes / 2**20, help="KV that may wait")
    parser.add_argument("--kv-shm", default=SHM_BASE, help="where memory is shared ('': KV travels by socket only)")
    parser.add_argument("--detached", action="store_true", help="outlive the parent process")
    args = parser.parse_args(argv)
    for name in ("max_slots", "max_context", "max_step_tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("kv_lease_s", "kv_return_lease_s", "kv_timeout_s", "kv_pending_mb"):
        if not 0.0 < getattr(args, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return args


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a hanging broadcast has a thread in torch, which would abort a normal interpreter exit
