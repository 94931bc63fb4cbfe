"""`rollart service`: external trainers and engines share prompts, experience and weights."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import json_option
from rollart.cli.listening import address, key, listen_option, serve_until_stopped, token_option
from rollart.compose.service import serve_service


@click.command()
@listen_option
@token_option("bearer token")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory that persists the service's data; without it, the data is lost when the service ends.",
)
@json_option
def service(listen: str, token_env: str | None, data: Path | None, as_json: bool) -> None:
    """Serve a table of samples until Ctrl-C: prompts in, experience in and out by columns, weights announced.

    For external trainers, engines and rewards; `rollart.service` is the Python client.
    """
    host, port = address(listen)
    server = serve_service(host=host, port=port, token=key(token_env, host), data=data)
    serve_until_stopped(server, as_json=as_json, hint='from rollart.service import Service; Service("{url}")')
