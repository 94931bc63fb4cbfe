"""`rollart service`: trainers and engines that are not ours share prompts, experience and weights."""

from __future__ import annotations

import click

from rollart.cli.context import json_option
from rollart.cli.listening import address, key, serve_until_stopped

__all__ = ["service"]


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0: any that is free.",
)
@click.option("--token-env", metavar="VAR", help="Variable with the bearer token that every call then needs.")
@json_option
def service(listen: str, token_env: str | None, as_json: bool) -> None:
    """Serve a table of samples until Ctrl-C: prompts in, experience in and out by columns, weights announced.

    For trainers, engines and rewards that are not ours; `rollart.service` is the Python client.
    """
    from rollart.compose.service import offering

    host, port = address(listen)
    server = offering(host=host, port=port, token=key(token_env, host))
    serve_until_stopped(server, as_json=as_json, hint='from rollart.service import Service; Service("{url}")')
