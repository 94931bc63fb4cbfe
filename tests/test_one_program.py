"""One program at every scale: what decides does not know whether it is simulated.

Simulated parts are chosen in `tools` and nowhere else. Below it nothing imports them, and nothing asks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import PRODUCT, ROOT, nodes

KNOW = {"sim", "tools", "testing", "cli"}
"""Packages that may name simulations: they are them, choose them, or are commands about them."""

ASKS = re.compile(r"(is_|in_|not_)?(simulat(ed|ion|ing)|sim|virtual(_time|_loop|ly)?)", re.IGNORECASE)
"""Names that only somebody has who wants to know."""


def sources() -> list[Path]:
    return [p for p in PRODUCT if (parts := p.relative_to(ROOT).parts)[0] == "rollart" and parts[1] not in KNOW]


def questions(code: Iterable[ast.AST]) -> Iterator[str]:
    """Conditions and parameters that ask whether this is a simulation, and imports of its parts."""
    for node in code:
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if _of_simulations(n.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{n.name}" for n in names if _of_simulations(f"{module}.{n.name}"))
            case ast.Constant(value=str(value)) if _of_simulations(value):
                yield value
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                yield from _names(test)
            case ast.Match(subject=subject):
                yield from _names(subject)
            case ast.match_case(guard=ast.expr() as guard):
                yield from _names(guard)
            case ast.comprehension(ifs=conditions):
                for condition in conditions:
                    yield from _names(condition)
            case ast.arg(arg=name) if ASKS.fullmatch(name):
                yield name


def _of_simulations(module: str) -> bool:
    return f"{module}.".startswith(("rollart.sim.", "rollart.testing."))


def _names(condition: ast.expr) -> Iterator[str]:
    for node in ast.walk(condition):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) if ASKS.fullmatch(name):
                yield name
            case ast.Constant(value=str(value)) if ASKS.fullmatch(value):
                yield value


@pytest.mark.parametrize(
    "text",
    [
        "if self.simulated: pass",
        "x = 1 if settings.is_simulated else 2",
        "import rollart.sim.loop",
        "from rollart import sim",
        "from rollart.sim import loop",
        "importlib.import_module('rollart.testing.parts')",
        "def f(*, simulated: bool) -> None: ...",
        "y = [p for p in parts if p.kind == 'simulated']",
        "while not virtual_time: pass",
        "match mode:\n    case _ if sim: pass",
        "match loop.virtual:\n    case True: pass",
        "assert clock.virtual",
    ],
)
def test_questions_are_found(text: str) -> None:
    assert list(questions(ast.walk(ast.parse(text))))


@pytest.mark.parametrize("text", ["if similar: pass", "sim = 1", "# if simulated", "if simulate(run).steps: pass"])
def test_what_is_no_question_is_left_alone(text: str) -> None:
    assert not list(questions(ast.walk(ast.parse(text))))


def test_no_module_asks() -> None:
    found = {str(path.relative_to(ROOT)): asked for path in sources() if (asked := list(questions(nodes(path))))}
    assert found == {}, "a decision does not know: give it another part in launch/ or tools/"


DECIDES = tuple(f"rollart.{name}" for name in ("control", "serving", "supervise", "strategies", "policy", "ledger"))

LOADED = """
import sys
{code}
print("\\n".join(m for m in sorted(sys.modules) if m.startswith({decides!r})))
"""


def test_real_runs_and_simulations_load_the_same_files() -> None:
    """Of what decides, whatever a simulation is made of is there in a real run."""

    def loaded(code: str) -> set[str]:
        text = LOADED.format(code=code, decides=DECIDES)
        return set(
            subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
        )

    simulated = loaded("import rollart.tools.simulate, rollart.sim.run")
    real = loaded("import rollart.launch.launch")
    assert "rollart.control.scheduler" in simulated
    assert simulated <= real, "a simulation has no scheduler, policy or ledger of its own"
