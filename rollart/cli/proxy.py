"""`rollart proxy`: any agent harness becomes a rollout by setting its base URL."""

from __future__ import annotations

from pathlib import Path

import click

from rollart.cli.context import json_option
from rollart.cli.listening import address, key, listen_option, serve_until_stopped, token_option
from rollart.compose.proxy import ProxySettings, SessionLimits, serve_proxy


@click.command()
@click.option(
    "--engine",
    "engines",
    multiple=True,
    required=True,
    metavar="URL",
    help="Engine to generate with; may be given again.",
)
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Hugging Face directory with tokenizer.json and, for chats, a chat template.",
)
@listen_option
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Jinja file to use instead of the tokenizer's own.",
)
@click.option(
    "--tool-parser",
    type=click.Choice(["hermes", "json", "none"]),
    help="Format of the model's tool calls; by default inferred from its template.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that gets every turn's segments, one JSON line each.",
)
@click.option(
    "--model-name",
    default="policy",
    show_default=True,
    help="Name of the policy in /v1/models. Requests may name any model.",
)
@click.option("--max-sessions", type=click.IntRange(1), metavar="N", help="Sessions kept. Default: 4096.")
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", help="Tokens kept in all sessions. Default: 100000000."
)
@click.option(
    "--idle-s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Sessions idle for this long may be evicted for others. Default: 3600.",
)
@token_option("API key")
@json_option
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
    as_json: bool,
) -> None:
    """Serve OpenAI's and Anthropic's APIs in front of engines until Ctrl-C, and capture every token.

    Sessions are named by the path (base URL http://HOST:PORT/s/SESSION/v1) or the header X-Rollart-Session. GET
    /sessions/SESSION gives a session's trajectories: token ids, log-probabilities and policy versions as sampled.
    """
    host, port = address(listen)
    token = key(token_env, host)
    asked = {"sessions": max_sessions, "tokens": max_tokens, "idle_s": idle_s}
    limits = SessionLimits(**{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]
    settings = ProxySettings(
        engines, tokenizer, host, port, chat_template, tool_parser, record, token=token, model=model_name, limits=limits
    )
    hint = "OPENAI_BASE_URL={url}/s/SESSION/v1  ANTHROPIC_BASE_URL={url}/s/SESSION"
    serve_until_stopped(serve_proxy(settings), as_json=as_json, hint=hint)
