"""The command line's surface is frozen: a change of a command, option or help text shows in help.txt.

After a wanted change: `python tests/cli/test_surface.py > tests/cli/help.txt`.
"""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollart.cli.commands import cli

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


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["report", "cost", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys\nfrom rollart.cli.main import run\nassert run({arguments!r}) == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_every_command_has_its_function() -> None:
    """Each command is implemented by a function with the command's parameters."""

    def leaves(command: click.Command) -> Iterator[click.Command]:
        if isinstance(command, click.Group):
            for child in command.commands.values():
                yield from leaves(child)
        else:
            yield command

    for command in leaves(cli):
        assert command.callback is not None
        function = pkgutil.resolve_name(f"rollart.cli.{command.callback.__dict__['target']}")
        differ = {p.name for p in command.params} ^ inspect.signature(function).parameters.keys()
        assert differ <= {"as_json"}, command.name  # where `--json` is `-o json`, the function knows only the latter


if __name__ == "__main__":
    print(surface())
