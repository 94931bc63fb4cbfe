"""The command line's surface is frozen: a change of a command, option or help text shows in help.txt.

After a wanted change: `python tests/cli/test_surface.py > tests/cli/help.txt`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollart.cli.main import COMMANDS, LazyCommand, cli

HELP = Path(__file__).parent / "help.txt"
HEAVY = (
    "aiobotocore",
    "aiohttp",
    "boto3",
    "matplotlib",
    "modal",
    "numpy",
    "pydantic",
    "ray",
    "rich",
    "scipy",
    "torch",
    "transformers",
    "yaml",
)


def surface() -> str:
    return "\n".join(_pages(cli, "rollart", None))


def _pages(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    command = command.load() if isinstance(command, LazyCommand) else command
    with click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=100,
        max_content_width=100,
        help_option_names=["-h", "--help"],
    ) as context:
        yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
        if isinstance(command, click.Group):
            for child in sorted(command.commands):
                yield from _pages(command.commands[child], child, context)


def test_the_surface_is_frozen() -> None:
    assert surface() + "\n" == HELP.read_text()


@pytest.mark.parametrize("listed", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("limit", [45, 70, 95])
def test_a_command_is_listed_by_the_first_sentence_of_its_help(listed: LazyCommand, limit: int) -> None:
    command = listed.load()
    assert command.name == listed.name
    assert command.get_short_help_str(limit) == listed.get_short_help_str(limit)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rollart.cli.main import run\nassert run(['--help']) == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


if __name__ == "__main__":
    print(surface())
