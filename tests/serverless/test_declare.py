"""`@reward`: the stored options, their extraction from the source, and that every argument is a setting."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, get_overloads

import pytest

from serverless.declare import ATTRIBUTE, declarations, reward
from serverless.errors import SpecInvalid
from serverless.spec import FunctionSpec

SOURCE = """
import rollart
raise SystemExit("nobody may run this here")

@rollart.reward(memory_mb=256, artefacts=("data.txt",), batch={"max_items": 7})
def one(sample): ...

@rollart.reward
async def two(sample): ...

def helper(): ...
"""


def test_declarations_are_found_by_attribute() -> None:
    assert declarations(SOURCE) == {
        "one": {"memory_mb": 256, "artefacts": ("data.txt",), "batch": {"max_items": 7}},
        "two": {},
    }


def test_the_decorator_returns_what_it_was_given() -> None:
    def function(sample: Any) -> float:
        return 1.0

    assert reward(function) is function
    assert reward(memory_mb=128)(function) is function
    assert getattr(function, ATTRIBUTE).settings == {"memory_mb": 128}
    with pytest.raises(TypeError, match="no argument 'memory'"):
        reward(memory=1)  # type: ignore[call-overload]


def test_declaring_imports_next_to_nothing() -> None:
    code = (
        "import sys; import serverless.declare, serverless.types; "
        "print([m for m in ('pydantic', 'numpy', 'asyncio', 'msgpack', 'torch') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_setting_of_a_function_can_be_declared_with_the_same_default() -> None:
    [_, declared] = get_overloads(reward)
    parameters = inspect.signature(declared).parameters
    fields = FunctionSpec.model_fields
    assert parameters.keys() == fields.keys() - {"source", "handler", "arguments"}
    for name, parameter in parameters.items():
        if name not in ("name", "batch", "env"):
            assert parameter.default == fields[name].default, name


@pytest.mark.parametrize(
    "arguments", ["cpu=2.0, gpu='L4', trust='untrusted', warm=1", "needs=('environment',), stateless=True, queue=3"]
)
def test_arguments_reach_the_settings(arguments: str) -> None:
    found = declarations(f"@reward({arguments})\ndef f(sample): ...")["f"]
    assert FunctionSpec(name="f", source="f.py", **found).model_dump(include=set(found)) == found


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("@reward(memory_mb=N)\ndef f(s): ...", r"f.py:1: @reward\(memory_mb=...\) is not a literal"),
        ("@reward(**SETTINGS)\ndef f(s): ...", r"f.py:1: @reward\(\*\*...\) is not a literal"),
        ("@reward('f')\ndef f(s): ...", r"f.py:1: @reward takes keyword arguments only"),
        ("def (", "f.py:1: not Python"),
    ],
)
def test_what_cannot_be_read_is_placed(text: str, error: str) -> None:
    with pytest.raises(SpecInvalid, match=error):
        declarations(text, filename="f.py")
