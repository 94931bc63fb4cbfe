"""Imports that a package's target does not have."""

from __future__ import annotations

import pathlib
from importlib import metadata

import pytest

from serverless.analysis.imports import check_declared, undeclared
from serverless.deploy.aws_function import AwsSettings, aws_function
from serverless.deploy.package import Package, build
from serverless.errors import PackageError
from serverless.spec import FunctionSpec

PYDANTIC = f"pydantic=={metadata.version('pydantic')}"
ROLLART = f"rollart=={metadata.version('rollart')}"
YAML = f"PyYAML=={metadata.version('PyYAML')}"
"""A distribution whose module has another name, which takes time to find."""


def packed(directory: pathlib.Path, source: str, *, files: dict[str, str] | None = None, **settings: object) -> Package:
    for name, text in {"f.py": source, **(files or {})}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return build(FunctionSpec(name="f", source="f.py", handler="f", **settings), base=directory)


def found(package: Package, provided: tuple[str, ...] = ()) -> list[tuple[str, int, str, bool]]:
    missing = undeclared(package.files, package.spec.requirements, provided=provided)
    return [(one.file, one.line, one.requirement, one.needed) for one in missing]


USES = "def f(sample): return 1.0\n"


NEEDED, PERHAPS = ("f.py", 1, PYDANTIC, True), ("f.py", 2, PYDANTIC, False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"import json, rollart, serverless.types\nfrom rollart import Sample\n{USES}", []),
        (f"from serverless import sandbox\nimport serverless.sandbox\n{USES}", [("f.py", 2, ROLLART, True)]),
        (f"from rollart.model import Segment\n{USES}", [("f.py", 1, ROLLART, True)]),
        (f"from pydantic.fields import Field\n{USES}", [("f.py", 1, PYDANTIC, True)]),
        (f"import pydantic as y\n{USES}", [NEEDED]),
        (f"import no_such_module.part\n{USES}", [("f.py", 1, "no_such_module", True)]),
        ("def f(sample):\n    import pydantic\n    return 1.0\n", [PERHAPS]),
        ("def g():\n    import pydantic\ndef f(sample): return g()\n", [PERHAPS]),
        (f"def plot():\n    import pydantic\n{USES}", []),
        ("class f:\n    import pydantic\n    def __call__(self, s): return 1.0\n", [("f.py", 2, PYDANTIC, True)]),
        (
            "class f:\n    def __call__(self, s):\n        import pydantic\n        return 1.0\n",
            [("f.py", 3, PYDANTIC, False)],
        ),
        (f"try:\n    import pydantic\nexcept ImportError:\n    pydantic = None\n{USES}", [PERHAPS]),
        (f"try:\n    import pydantic\nexcept (KeyError, ModuleNotFoundError):\n    pydantic = None\n{USES}", [PERHAPS]),
        (f"try:\n    import pydantic\nexcept KeyError:\n    pydantic = None\n{USES}", [("f.py", 2, PYDANTIC, True)]),
        (
            f"try:\n    import tomllib\nexcept ImportError:\n    import tomli as tomllib\n{USES}",
            [("f.py", 4, "tomli", False)],
        ),
        (
            f"import contextlib\nwith contextlib.suppress(ImportError):\n    import pydantic\n{USES}",
            [("f.py", 3, PYDANTIC, False)],
        ),
        (f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pydantic\n{USES}", []),
        (f"import sys\nif sys.version_info >= (3, 0):\n    import pydantic\n{USES}", [("f.py", 3, PYDANTIC, True)]),
    ],
)
def test_imports_of_a_file(tmp_path: pathlib.Path, source: str, expected: list[tuple[str, int, str, bool]]) -> None:
    assert found(packed(tmp_path, source)) == expected


def test_what_is_packed_required_or_provided_is_declared(tmp_path: pathlib.Path) -> None:
    package = packed(
        tmp_path,
        "import beside, data.more\nimport yaml, boto3\nimport annotated_types\n" + USES,
        files={"beside.py": "from data import value\n", "data/more.py": "", "data/__init__.py": "value = 1\n"},
        requirements=("pyyaml", "pydantic"),
    )
    assert "annotated-types" in str(package.spec.requirements), "a dependency of a requirement"
    assert found(package, ("boto3",)) == []
    assert [one[2].partition("==")[0] for one in found(package)] == ["boto3"]


def test_modules_that_the_entry_does_not_import_do_not_count(tmp_path: pathlib.Path) -> None:
    files = {"__init__.py": "from .score import f\n", "score.py": f"from . import used\n{USES}"}
    files |= {"used.py": "import pydantic\n", "train.py": "import click\n"}
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    package = build(FunctionSpec(name="f", source="mine", handler="f"), base=tmp_path)
    assert "function/mine/train.py" in package.files
    assert found(package) == [("mine/used.py", 1, PYDANTIC, True)]


def test_a_requirement_that_is_not_installed_may_bring_any_module(tmp_path: pathlib.Path) -> None:
    source = f"import some_module\nimport pydantic\n{USES}"
    assert [one[1] for one in found(packed(tmp_path, source, requirements=("not-installed-here==1.0",)))] == [2]


@pytest.mark.slow  # looks for the module in every distribution
def test_providers_refuse_in_one_line_with_the_remedy(tmp_path: pathlib.Path) -> None:
    package = packed(tmp_path, f"import boto3\nimport yaml\n{USES}")
    with pytest.raises(PackageError) as on_aws:
        aws_function(package, AwsSettings())
    assert on_aws.value.message == ("function f: f.py:2: imports yaml, which is neither packed nor in its requirements")
    assert on_aws.value.remedy == f'declare it: @reward(requirements=["{YAML}"])'
    with pytest.raises(PackageError, match=r"f\.py:1: imports boto3.*; f\.py:2: imports yaml"):
        check_declared(package.spec, package.files, "modal")
    own_image = packed(tmp_path, "import yaml\n" + USES, image={"base": "python:3.11"})
    check_declared(own_image.spec, own_image.files, "modal")
