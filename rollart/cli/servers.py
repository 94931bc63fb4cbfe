"""Commands that serve until they are stopped: `rollart proxy`, through which any agent harness becomes a rollout by
setting its base URL; `rollart service`, where external trainers and engines share prompts, experience and weights; and
`rollart rewards serve`, the rewards of a file behind HTTP, from workers on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import click

from rollart.adapters.proxy.sessions import SessionLimits
from rollart.cli.context import RESOLVED, cluster_functions, find_run
from rollart.cli.controller import live_controller
from rollart.cli.process import INTERRUPTED
from rollart.cli.rewards.operate import names_deployed
from rollart.dashboard.server import Dashboard, DashboardAccess
from rollart.errors import ProviderError, UsageError
from rollart.launch.functions import (
    LiveVersionCalls,
    backend,
    canonical_provider,
    deployer,
    function_secrets,
    packages_in,
    translated_errors,
)
from rollart.launch.servers import serve_app, serve_proxy, serve_service
from rollart.lifeline import stop_event
from rollart.settings.base import is_loopback
from rollart.settings.cluster import ClusterFunctions
from serverless.deploy.package import Package
from serverless.providers.base import LIVE, AttachableBackend, Backend, DeployedFunction, split_reference
from serverless.providers.http_server import HEALTH, FunctionHttpServer
from serverless.providers.weighted import WeightedBackend

SAMPLE = [{"id": "1", "messages": [{"role": "assistant", "content": "42"}], "reference_answer": "42", "metadata": {}}]


def proxy(
    engines: tuple[str, ...],
    tokenizer: Path,
    listen: str,
    chat_template: Path | None,
    tool_parser: str | None,
    record: Path | None,
    model_name: str,
    max_sessions: int | None,
    max_tokens: int | None,
    idle_s: float | None,
    token_env: str | None,
    output: str,
) -> None:
    host, port = _address(listen)
    token = _secret(token_env, host, f"--listen on {host}", "key")
    asked = {"sessions": max_sessions, "tokens": max_tokens, "idle_s": idle_s}
    limits = SessionLimits(**{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]
    server = serve_proxy(
        engines,
        tokenizer,
        host=host,
        port=port,
        template=chat_template,
        tools=tool_parser,
        record=record,
        token=token,
        model=model_name,
        limits=limits,
    )
    hint = "OPENAI_BASE_URL={url}/s/SESSION/v1  ANTHROPIC_BASE_URL={url}/s/SESSION"
    _serve(server, lambda url: _announce(url, hint.format(url=url), output == "json"))


def service(listen: str, token_env: str | None, data: Path | None, output: str) -> None:
    host, port = _address(listen)
    token = _secret(token_env, host, f"--listen on {host}", "key")
    server = serve_service(host=host, port=port, token=token, data=data)
    _serve(
        server, lambda url: _announce(url, f'from rollart.service import Service; Service("{url}")', output == "json")
    )


def dashboard(run: str | None, host: str, port: int, token_env: str | None, output: str, runs_dir: Path) -> None:
    one = None if run is None else find_run(run, runs_dir)
    if one is None and not runs_dir.is_dir():
        raise UsageError(f"{runs_dir}: no directory of runs", remedy="give a run, or --runs DIR")
    token = _secret(token_env, host, "", "") if token_env or is_loopback(host) else secrets.token_urlsafe(24)

    def list_runs() -> list[Path]:
        if one is not None:
            return [one]
        found = [path for path in runs_dir.iterdir() if (path / RESOLVED).is_file()]
        return sorted(found, key=lambda path: (-(path / RESOLVED).stat().st_mtime_ns, path.name))

    def is_running(directory: Path) -> bool:
        return live_controller(directory) is not None

    app = Dashboard(list_runs, is_running, access=DashboardAccess(token), single=one is not None).app()
    query = f"/?token={token}" if token else "/"
    server = serve_app(app, host=host, port=port)
    _serve(server, lambda url: _announce(url + query, "open it in a browser", output == "json"))


def serve(
    source: str,
    host: str,
    port: int,
    token_env: str | None,
    provider: str,
    cluster: Path | None,
    root: Path,
    allow_unsafe: bool,
    output: str,
) -> None:
    token = _secret(token_env, host, f"--host {host}", "token")
    functions = cluster_functions(cluster)
    functions = functions.model_copy(update={"allow_unsafe": allow_unsafe or functions.allow_unsafe})
    name, machine = canonical_provider(provider), output == "json"
    with translated_errors():
        if names_deployed(source):
            deployed = _deployed_backend(source, name, functions, root)
            _serve(
                _reward_server(deployed, host=host, port=port, token=token),
                lambda url: _announce_rewards(url, {split_reference(source)[0]: ""}, (), token_env or "", machine),
            )
        if name != "local":
            raise UsageError(
                f"the rewards of {source} are served in workers here, not on '{name}'",
                remedy="drop --provider, or deploy the file and give its name",
            )
        packages = packages_in(source)
        versions = {package.spec.name: package.version for package in packages}
        warnings = [f"{package.spec.name}: {text}" for package in packages for text in package.warnings]
        _serve(
            _reward_server(_file_backend(packages, functions), host=host, port=port, token=token),
            lambda url: _announce_rewards(url, versions, warnings, token_env or "", machine),
        )


@asynccontextmanager
async def _file_backend(packages: list[Package], functions: ClusterFunctions) -> AsyncIterator[Backend]:
    """Workers on this machine for the rewards of a file."""
    values = function_secrets(functions, Path.cwd(), late=True)
    async with backend("local", functions, secrets=values) as target:
        for package in packages:
            await target.deploy(package)
        yield target


@asynccontextmanager
async def _deployed_backend(
    reference: str, provider: str, functions: ClusterFunctions, root: Path
) -> AsyncIterator[Backend]:
    """Calls of a deployed function, each by the weights of its versions."""
    function, wanted = split_reference(reference)

    @asynccontextmanager
    async def open_version(version: DeployedFunction) -> AsyncIterator[Backend]:
        async with backend(provider, functions, root=root) as target:
            if not isinstance(target, AttachableBackend):
                await target.deploy(await control.package(function, version.provider_version))
                yield target
            elif wanted != LIVE:  # the alias may name another version tomorrow
                await target.attach(function, version.provider_version)
                yield target
            else:
                known = version.provider_version

                def last_read() -> DeployedFunction:
                    return next((one for one in served.versions if one.provider_version == known), version)

                async with LiveVersionCalls(target, last_read) as calls:
                    yield calls

    async with deployer(provider, functions, root=root) as control:
        draw = secrets.SystemRandom().random
        async with WeightedBackend(control, function, open_version, draw=draw, wanted=wanted) as served:
            yield served


@asynccontextmanager
async def _reward_server(
    workers: AbstractAsyncContextManager[Backend], *, host: str, port: int, token: str
) -> AsyncIterator[str]:
    """The URL of the rewards. Workers and calls in flight end within bounded time."""
    async with workers as target, AsyncExitStack() as stack:
        front = FunctionHttpServer(target, host=host, port=port, token=token)
        try:
            await stack.enter_async_context(front)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", remedy="choose another --host or --port"
            ) from None
        yield front.url


def _announce_rewards(
    url: str, versions: Mapping[str, str], warnings: Sequence[str], token_env: str, as_json: bool
) -> None:
    """`versions`: digests by function, '' for a deployed one, whose version is drawn per call."""
    urls = {name: f"{url}/functions/{name}" for name in versions}
    if as_json:
        functions = [{"function": name, "url": at, "version": versions[name]} for name, at in urls.items()]
        click.echo(json.dumps({"schema_version": 1, "url": url, "health": url + HEALTH, "functions": functions}))
        return
    for name, at in urls.items():
        click.echo(f"{name}  {at}")
    for warning in warnings:
        click.echo(warning, err=True)
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


def _address(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen {listen} (rule: HOST:PORT)", remedy="for example 127.0.0.1:8100")
    return host.strip("[]"), int(port)


def _secret(variable: str | None, host: str, given: str, kind: str) -> str:
    """The key or token that calls need; UsageError without one if other machines can call. `given`: the option that
    named the host."""
    if variable is not None:
        value = os.environ.get(variable, "")
        if not value:
            raise ProviderError(f"the environment variable {variable} is not set", remedy=f"export {variable}=…")
        return value
    if not is_loopback(host):
        raise UsageError(
            f"{given} is reachable from elsewhere (rule: with a {kind}, unless it is this machine alone)",
            remedy=f"name a variable with a {kind}: --token-env VAR",
        )
    return ""


def _serve(server: AbstractAsyncContextManager[str], announce: Callable[[str], None]) -> None:
    """Announce the server's URL, and wait for SIGINT or SIGTERM."""

    async def until_stopped() -> None:
        stopped = stop_event()
        async with server as url:
            announce(url)
            await stopped.wait()

    asyncio.run(until_stopped())
    raise click.exceptions.Exit(INTERRUPTED)


def _announce(url: str, hint: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "url": url}))
    else:
        click.echo(url)
        click.echo(hint, err=True)
        click.echo("Ctrl-C stops it", err=True)
