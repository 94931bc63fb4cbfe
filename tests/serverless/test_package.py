"""Packages and declarations: the same function is the same bytes and version anywhere; user code is not run."""

from __future__ import annotations

import io
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import pytest
from pydantic import ValidationError

from serverless.declare import ATTRIBUTE, declarations, reward
from serverless.deploy.handler import adapt
from serverless.deploy.package import Package, build
from serverless.errors import PackageError, SpecInvalid
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


def pack(directory: pathlib.Path, text: str = SOURCE, **settings: Any) -> Package:
    (directory / "mine.py").write_text(text)
    (directory / "data.txt").write_text("weights")
    return build(FunctionSpec(**{"name": "one", "source": "mine.py", **settings}), base=directory)


def test_the_decorators_settings_are_read_and_the_specs_win(tmp_path: pathlib.Path) -> None:
    spec = pack(tmp_path, timeout_s=3.0, memory_mb=1024).spec
    assert (spec.memory_mb, spec.timeout_s, spec.batch.max_items) == (1024, 3.0, 7)
    assert spec.artefacts == (str(tmp_path / "data.txt"),)


def test_a_package_is_the_same_from_any_directory_and_at_any_time(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one, two = pack(first), pack(second, concurrency=9, keep_alive_s=1.0)
    assert one.version == two.version
    assert one.zip() == two.zip()
    shutil.copyfile(second / "data.txt", first / "data.txt")
    assert pack(first).zip() == one.zip()


def test_what_runs_makes_the_version(tmp_path: pathlib.Path) -> None:
    versions = {
        pack(tmp_path).version,
        pack(tmp_path, memory_mb=300).version,
        pack(tmp_path, handler="two").version,
        pack(tmp_path, SOURCE + "#").version,
        pack(tmp_path, name="other", handler="one").version,
    }
    assert len(versions) == 5


def test_a_package_holds_the_handler_the_manifest_the_source_and_the_artefacts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "deep" / "x.bin").write_bytes(b"\0")
    (tmp_path / "models" / "__pycache__").mkdir()
    (tmp_path / "models" / "__pycache__" / "junk.pyc").write_bytes(b"\0")
    packed = pack(tmp_path, artefacts=("models", "data.txt"))
    with zipfile.ZipFile(io.BytesIO(packed.zip())) as archive:
        assert archive.namelist() == [
            "artefacts/data.txt",
            "artefacts/models/deep/x.bin",
            "function/mine.py",
            "rollart_handler.py",
            "rollart_manifest.json",
        ]
    packed.write(tmp_path / "out")
    assert (tmp_path / "out" / "function" / "mine.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("settings", "text", "error"),
    [
        ({"source": "none.py"}, SOURCE, "none.py: No such file"),
        ({"source": "no_such.module"}, SOURCE, "no module 'no_such.module'"),
        ({"artefacts": ("none.bin",)}, SOURCE, "none.bin: No such file"),
        ({"artefacts": ("data.txt", "data.txt")}, SOURCE, "two artefacts are called"),
        ({"name": "three"}, SOURCE, "several rewards: one, two"),
        ({}, "from . import x", "mine.py:1: .* cannot import relatively"),
    ],
)
def test_what_cannot_be_packed_says_why(
    tmp_path: pathlib.Path, settings: dict[str, Any], text: str, error: str
) -> None:
    with pytest.raises(PackageError, match=error):
        pack(tmp_path, text, **settings)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("@reward(memory_mb=N)\ndef one(s): ...", r"memory_mb=...\) is not a literal"),
        ("def (", "mine.py:1: not Python"),
        ("@reward(memory_mb=3)\ndef one(s): ...", "function one: memory_mb: .*128.*got 3"),
        ("@reward(memory=3)\ndef one(s): ...", "function one: memory: "),
    ],
)
def test_a_wrong_declaration_is_placed(tmp_path: pathlib.Path, text: str, error: str) -> None:
    with pytest.raises(SpecInvalid, match=error):
        pack(tmp_path, text)


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


@pytest.mark.parametrize(
    "settings",
    [
        {"warm": 5, "concurrency": 4},
        {"memory_mb": 64},
        {"timeout_s": 0},
        {"name": "no spaces"},
        {"cores": 1},
        {"source": "a:b", "handler": "c"},
    ],
)
def test_a_spec_that_breaks_a_rule_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FunctionSpec.model_validate({"name": "f", "source": "f.py", **settings})


def test_a_module_is_packed_by_its_import_path() -> None:
    packed = build(FunctionSpec(name="f", source="tests.serverless.functions.rules:exact_match"))
    assert packed.spec.memory_mb == 128
    assert "function/rules.py" in packed.files
    assert build(FunctionSpec(name="f", source="tests.serverless.functions.rules")).version == packed.version


def test_handlers_are_recognised_by_their_parameters() -> None:
    event = [{"id": "a", "messages": [], "reference_answer": None, "metadata": {}}]
    assert adapt(lambda event, context: ["event", context])(event, "c") == ["event", "c"]
    assert adapt(lambda items: ["items", len(items)])(event, None) == ["items", 1]
    assert adapt(lambda sample: 2)(event, None)[0]["aggregate_reward_score"] == 2.0
    assert adapt(lambda anything: [len(anything)], takes="items")(event, None) == [1]


def test_a_class_is_loaded_once_with_its_artefacts(tmp_path: pathlib.Path) -> None:
    class Model:
        loads = 0

        def load(self, artefacts: pathlib.Path) -> None:
            Model.loads += 1
            self.value = float((artefacts / "v").read_text())

        def __call__(self, sample: Any) -> float:
            return self.value

    (tmp_path / "v").write_text("0.25")
    handler = adapt(Model, artefacts=tmp_path)
    event = [{"id": "a", "messages": []}, {"id": "b", "messages": []}]
    assert [a["aggregate_reward_score"] for a in handler(event, None)] == [0.25, 0.25]
    assert Model.loads == 1
