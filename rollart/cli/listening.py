"""Shared by commands that serve until they are stopped: address, token, and the serving loop."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import click

from rollart.addresses import is_loopback
from rollart.cli.process import INTERRUPTED
from rollart.cli.reward_serve import token_in
from rollart.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

listen_option = click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0: any that is free.",
)


def token_option(secret: str) -> Callable[[F], F]:
    """`--token-env`, whose variable holds `secret`."""
    return click.option("--token-env", metavar="VAR", help=f"Variable with the {secret} that every call then needs.")


def address(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen {listen} (rule: HOST:PORT)", remedy="for example 127.0.0.1:8100")
    return host.strip("[]"), int(port)


def key(token_env: str | None, host: str) -> str:
    """The key that calls need; UsageError without a key if other machines can call."""
    token = token_in(token_env)
    if not token and not is_loopback(host):
        raise UsageError(
            f"--listen on {host} is reachable from elsewhere (rule: with a key, unless it is this machine alone)",
            remedy="name a variable with a key: --token-env VAR",
        )
    return token


def serve_until_stopped(server: AbstractAsyncContextManager[str], *, as_json: bool, hint: str) -> None:
    """Announce the server's URL, and wait for SIGINT or SIGTERM. `hint` is for people, with {url} in it."""
    asyncio.run(_serve(server, as_json, hint))
    raise click.exceptions.Exit(INTERRUPTED)


async def _serve(server: AbstractAsyncContextManager[str], as_json: bool, hint: str) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with server as url:
        if as_json:
            click.echo(json.dumps({"schema_version": 1, "url": url}))
        else:
            click.echo(url)
            click.echo(hint.format(url=url), err=True)
            click.echo("Ctrl-C stops it", err=True)
        await stopped.wait()
