"""A sandbox of an installation that lies where programs have their scratch directory: below /tmp."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator

import msgpack
import pytest

import serverless
from tests.serverless.sandbox.support import WAYS, box

pytestmark = pytest.mark.slow  # real processes

PROGRAM = """
import json, sys, tempfile
from serverless.errors import SandboxUnavailable
from serverless.sandbox.box import SandboxProcess
from serverless.sandbox.box import Box
from serverless.sandbox.values import Limits
rung, variant = sys.argv[1:]
try:
    with Box(SandboxProcess(rung, limits=Limits(), preload=("below",), allow_unsafe=False, only=variant)) as box:
        said = []
        for n in range(2):
            ran = box.run(
                "import below, os, tempfile; open('f', 'w').write('x')\\n"
                "with tempfile.NamedTemporaryFile() as f: f.write(b'x')\\n"
                "print(below.VALUE, os.listdir('.'), below.__file__)"
            )
            said.append([ran.status, ran.stdout, ran.stderr])
        where = box.run("open('" + sys.prefix + "/breach', 'w').write('x')")
        said.append([where.status, where.stdout, where.stderr])
        print(json.dumps([said, box.pid]))
except SandboxUnavailable as error:
    print(json.dumps(error.message))
"""


@pytest.fixture(scope="module")
def python() -> Iterator[pathlib.Path]:
    """The interpreter of an environment below /tmp, with this package and another in it."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="rollart-installed-", dir="/tmp"))
    try:
        directory.chmod(0o755)
        venv.create(directory / "venv", symlinks=True, with_pip=False)
        site = next((directory / "venv" / "lib").glob("python3*")) / "site-packages"
        for package in (serverless, msgpack):
            assert package.__file__ is not None
            source = pathlib.Path(package.__file__).parent
            shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        (site / "below.py").write_text("VALUE = 42\n")
        yield directory / "venv" / "bin" / "python"
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("way", WAYS)
def test_a_sandbox_of_an_installation_below_tmp_works_and_is_as_closed(way: str, python: pathlib.Path) -> None:
    with box(way):
        pass  # skipped where this way does not work at all
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(python), "-c", PROGRAM, *WAYS[way]], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said, _ = json.loads(done.stdout)
    file = next(python.parents[1].glob("lib/python3*/site-packages/below.py"))
    assert [(status, out) for status, out, _ in said[:2]] == [("ok", f"42 ['f'] {file}\n")] * 2, said
    status, _, error = said[2]
    assert (status, "Error" in error) == ("exit", True)
    assert not (python.parents[1] / "breach").exists()
    assert sys.prefix != str(python.parents[1])
