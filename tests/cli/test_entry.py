"""Signals that come while the command line is imported, before any command could answer them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # processes of their own

WHILE = """
import signal, sys

awaited, sent = sys.argv.pop(1), int(sys.argv.pop(1))

class Then:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            signal.raise_signal(sent)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test that was started in the background ignores it
sys.meta_path.insert(0, Then())
from rollart.cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("sent", "code", "told"),
    [(signal.SIGINT, 130, "rollart: interrupted\n"), (signal.SIGTERM, 143, "rollart: terminated\n")],
)
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("click", ["--help"]),
        ("rollart.cli.status", ["status"]),
        ("rollart.settings.run", ["schema", "run"]),
        ("rollart.tools.simulations", ["simulate"]),
    ],
)
def test_it_ends_in_one_line(sent: signal.Signals, code: int, told: str, module: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", WHILE, module, str(int(sent)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


DURING_A_MODEL = """
import signal, sys

awaited = sys.argv.pop(1)

class Bound:
    def __float__(self):
        signal.raise_signal(signal.SIGINT)

class Then:
    def find_spec(self, name, path=None, target=None):
        if name == awaited:
            from pydantic_core import SchemaValidator
            SchemaValidator({"type": "nullable", "schema": {"type": "float", "gt": Bound()}})

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Then())
from rollart.cli.entry import main
main()
"""
"""pydantic-core raises a SchemaError with the text of the interrupt, and without the interrupt."""


@pytest.mark.parametrize(("module", "arguments"), [("click", ["--help"]), ("rollart.settings.run", ["schema", "run"])])
def test_an_interrupt_while_a_model_is_built_is_one(module: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", DURING_A_MODEL, module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rollart: interrupted\n")


WHILE_CLOSING = """
import signal, sys

class HalfClosed:
    def __del__(self):
        raise ValueError("Invalid file descriptor: -1")

class Then:
    def find_spec(self, name, path=None, target=None):
        if name == "rollart.cli.status":
            half_closed = HalfClosed()
            signal.raise_signal(int(sys.argv.pop()))

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Then())
from rollart.cli.entry import main
main()
"""
"""An event loop whose `close` was interrupted fails like this when it is collected."""


@pytest.mark.parametrize(
    ("sent", "code", "told"),
    [(signal.SIGINT, 130, "rollart: interrupted\n"), (signal.SIGTERM, 143, "rollart: terminated\n")],
)
def test_what_an_interrupt_left_half_closed_says_nothing(sent: signal.Signals, code: int, told: str) -> None:
    command = [sys.executable, "-c", WHILE_CLOSING, "status", str(int(sent))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_runs_without_a_standard_stream(closed: str) -> None:
    command = f'"{sys.executable}" -m rollart.cli.main --version {closed}'
    assert subprocess.run(["bash", "-c", command], capture_output=True, timeout=60).returncode == 0
