"""`rollart rewards serve`: rewards of a file behind HTTP, from workers on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click

from rollart.addresses import is_loopback
from rollart.cli.context import cluster_functions, json_option
from rollart.cli.process import INTERRUPTED
from rollart.compose.providers import backend, packages_in, translated_errors
from rollart.errors import ProviderError, UsageError
from serverless.backends.front import HEALTH, FunctionHttpServer
from serverless.deploy.package import Package

SAMPLE = [{"id": "1", "messages": [{"role": "assistant", "content": "42"}], "reference_answer": "42", "metadata": {}}]


@click.command()
@click.argument("source", metavar="FILE")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any that is free.")
@click.option("--token-env", metavar="VAR", help="Variable with the bearer token that every call then needs.")
@click.option("--cluster", type=click.Path(path_type=Path), help="Cluster spec whose `functions.local` is used.")
@click.option("--allow-unsafe", is_flag=True, help="Run untrusted rewards without a sandbox.")
@json_option
def serve(
    source: str, host: str, port: int, token_env: str | None, cluster: Path | None, allow_unsafe: bool, as_json: bool
) -> None:
    """Serve the rewards of FILE over HTTP until Ctrl-C, in workers that start on demand.

    A run with the provider `http` can call them, and so can clients of AWS Lambda's API (Invoke). GET /health answers
    200 while it serves.
    """
    token = token_in(token_env)
    if not token and not is_loopback(host):
        raise UsageError(
            f"--host {host} is reachable from elsewhere (rule: with a token, unless it is this machine alone)",
            remedy="name a variable with a token: --token-env VAR",
        )
    packages = packages_in(source)
    functions = cluster_functions(cluster)
    settings, unsafe = functions.settings("local"), allow_unsafe or functions.allow_unsafe
    with translated_errors():
        asyncio.run(
            _serve(
                packages,
                lambda url: _announce(url, packages, token_env or "", as_json),
                settings=settings,
                host=host,
                port=port,
                token=token,
                allow_unsafe=unsafe,
            )
        )
    raise click.exceptions.Exit(INTERRUPTED)


async def _serve(
    packages: list[Package],
    announce: Callable[[str], None],
    *,
    settings: dict[str, Any],
    host: str,
    port: int,
    token: str,
    allow_unsafe: bool,
) -> None:
    """Until SIGINT or SIGTERM; workers and calls in flight then end within bounded time."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(backend("local", settings, allow_unsafe=allow_unsafe))
        for package in packages:
            await target.deploy(package)
        front = FunctionHttpServer(target, host=host, port=port, token=token)
        try:
            await stack.enter_async_context(front)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", remedy="choose another --host or --port"
            ) from None
        announce(front.url)
        await stopped.wait()


def _announce(url: str, packages: list[Package], token_env: str, as_json: bool) -> None:
    urls = {package.spec.name: f"{url}/functions/{package.spec.name}" for package in packages}
    if as_json:
        versions = {package.spec.name: package.version for package in packages}
        functions = [{"function": name, "url": at, "version": versions[name]} for name, at in urls.items()]
        click.echo(json.dumps({"schema_version": 1, "url": url, "health": url + HEALTH, "functions": functions}))
        return
    for name, at in urls.items():
        click.echo(f"{name}  {at}")
    for package in packages:
        for warning in package.warnings:
            click.echo(f"{package.spec.name}: {warning}", err=True)
    first = next(iter(urls.values()))
    header = f' -H "Authorization: Bearer ${token_env}"' if token_env else ""
    click.echo(f"try it:  curl -s{header} {first} -d '{json.dumps(SAMPLE)}'", err=True)
    entries = ", ".join(
        f'{name}: {{url: "{at}", token_env: {token_env}}}' if token_env else f'{name}: "{at}"'
        for name, at in urls.items()
    )
    click.echo(f"health:  {url}{HEALTH} (GET, without a token)", err=True)
    click.echo(f"for a cluster spec:  functions: {{backend: http, http: {{{entries}}}}}", err=True)
    click.echo("Ctrl-C stops it", err=True)


def token_in(variable: str | None) -> str:
    if variable is None:
        return ""
    value = os.environ.get(variable, "")
    if not value:
        raise ProviderError(f"the environment variable {variable} is not set", remedy=f"export {variable}=…")
    return value
