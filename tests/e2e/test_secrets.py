"""A secret of a reward is in no file, output or process of a run, whatever its reward does with it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.cli.main import run as rollart
from rollart.ledger.reader import LedgerReader
from rollart.model import InfraFault, Scored
from tests.e2e.harness import CLUSTER, ROOT, Home, held, processes, tiny
from tests.e2e.secrets import digest

pytestmark = pytest.mark.slow  # a whole run in real processes

VALUE = "sk-run-$eCr3t/+ 0123456789abcdef"

FUNCTIONS = ("keyed", "boxed", "nosy")
REPORTS = ("cost", "utilization", "offload", "timeline")


def forms(value: str) -> Iterator[bytes]:
    yield value.encode()
    yield value.encode().hex().encode()
    yield base64.b64encode(value.encode()).rstrip(b"=")[:-1]
    yield base64.b64encode(f"user:{value}".encode())


def leaked(data: bytes) -> bool:
    return any(form in data for form in forms(VALUE))


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and those that it holds compressed."""
    data = path.read_bytes()
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    with contextlib.suppress(OSError, EOFError, zlib.error):
        yield gzip.decompress(data)


def proc() -> Iterator[tuple[str, bytes]]:
    for path in (*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline")):
        with contextlib.suppress(OSError):
            yield str(path), path.read_bytes()


def test_a_secret_stays_in_its_function(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        code, captured = rollart(arguments), capfd.readouterr()
        assert code == 0, (arguments, captured.err)
        return captured.out + captured.err

    (home.path / ".env").write_text(f"TEAM_KEY='{VALUE}'\n")
    functions = [{"name": name, "source": str(ROOT / "tests/e2e/secrets.py"), "handler": name} for name in FUNCTIONS]
    spec = tiny(
        **held(home),
        functions=functions,
        domains__0__rewards=[{"function": function["name"]} for function in functions],
        faults={"min_count": 1000},
        keep="all",
    )
    run = home.launch(spec, cluster=CLUSTER)
    run.until_step(1)
    assert len(processes(home.path)) > 4
    assert [path for path, data in proc() if leaked(data)] == []
    monkeypatch.chdir(home.path)
    live = [shown("status", "tiny-1"), shown("logs", "tiny-1", "-n", "1000")]
    home.open()
    run.finished()
    live.append(shown("launch", "run.yaml", "--cluster", "cluster.yaml", "--dry-run"))
    printed = shown("rewards", "logs", "keyed", "--root", "runs/tiny-1/functions")
    reports = [shown("report", kind, "tiny-1", "-o", form) for kind in REPORTS for form in ("json", "html")]
    assert not leaked("".join([*live, printed, *reports]).encode())
    assert "a child has [secret TEAM_KEY]" in printed
    files = [path for path in home.path.rglob("*") if path.is_file() and path.name != ".env"]
    assert [str(path) for path in files if any(leaked(data) for data in contents(path))] == []
    assert any(b"401 for Bearer [secret TEAM_KEY]" in path.read_bytes() for path in files if "ledger" in path.name)

    with LedgerReader(home.directory) as ledger:
        kept = list(ledger.kept())
    assert not any(leaked(repr(item).encode()) for item in kept)
    outcomes = {name: [s.outcome for item in kept for s in item.scores if s.function == name] for name in FUNCTIONS}
    faults = [outcome.detail for outcome in outcomes["keyed"] if isinstance(outcome, InfraFault)]
    assert faults
    assert all("[secret TEAM_KEY]" in detail for detail in faults)
    assert {o.metrics["key"] for o in outcomes["keyed"] if isinstance(o, Scored)} == {digest(VALUE)}
    assert {o.value for o in outcomes["boxed"] if isinstance(o, Scored)} == {0.0}
    assert {(o.value, o.metrics["mode"]) for o in outcomes["nosy"] if isinstance(o, Scored)} == {(0.0, 1.0)}
