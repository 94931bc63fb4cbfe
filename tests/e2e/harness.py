"""Running `rollart` as a user does, in processes of its own, and knowing every process that it started."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollart.ledger.reader import LedgerReader
from rollart.report.verification import verify

ROOT = Path(__file__).parents[2]

POLL_S = 0.02
"""Between two looks at a file or at /proc: a hundredth of what is waited for."""

LIMIT_S = 240.0
"""For anything, which only a failure meets: a whole run takes about 8 s on two idle cores, and others may use them."""

GATE = "gate"
"""In a run's directory: what is held waits for this file."""

STEPS, GROUPS, GROUP_SIZE = 4, 4, 2
BATCH = GROUPS * GROUP_SIZE

Spec = dict[str, Any]


def tiny(**changes: Any) -> Spec:
    """A run of `STEPS` steps of `BATCH` two-turn trajectories: mostly process starts. `a__b=c` sets key b of a."""
    spec: Spec = {
        "name": "tiny",
        "model": {
            "init": {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": 128,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "hidden_act": "silu",
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "torch_dtype": "float32",
                "pad_token_id": 0,
                "eos_token_id": 1,
            },
            "tokenizer": "rollart.quickstart.tokenizer:write_tokenizer",
            "context": 16,
        },
        "staleness": 1,
        "steps": STEPS,
        "batch": {"trajectories": BATCH},
        "domains": [
            {
                "name": "coin",
                "environment": "tests.e2e.worlds:Coin",
                "environment_args": {},
                "group_size": GROUP_SIZE,
                "max_turns": 2,
                "max_tokens": 1,
                "env_reward_weight": 0.0,
                "rewards": [{"function": "rule"}],
            }
        ],
        "functions": [
            {
                "name": "rule",
                "source": str(ROOT / "tests/e2e/rewards.py"),
                "handler": "rule",
                "memory_mb": 128,
                "batch_items": 8,
                "timeout_s": 5.0,
            }
        ],
        "training": {"lr": 1e-3},
        "faults": {"min_count": 6},
    }
    return changed(spec, **changes)


def changed(spec: Spec, **changes: Any) -> Spec:
    """A copy with other values. `a__b=c` sets key b of a."""
    spec = copy.deepcopy(spec)
    for key, value in changes.items():
        _set(spec, key.split("__"), value)
    return spec


def held(home: Home, free: int = STEPS * BATCH - BATCH, **arguments: Any) -> Spec:
    """For `tiny`: of each life's games only so many begin before `home.open()`, by default what all steps but the last
    need, so that no run ends before a test is done with it, however slow the test is."""
    return {
        "domains__0__environment": "tests.e2e.worlds:Held",
        "domains__0__environment_args": {"turns": 2, "free": free, "gate": str(home.path / GATE), **arguments},
        "leases__env_step_s": LIMIT_S,
    }


MOVES_WEIGHTS: Spec = {"baseline": "none", "normalize": "none"}
"""The `advantage` of a domain in which every step changes the weights, also one whose groups have equal rewards."""

CLUSTER: Spec = {
    "name": "two-cores",
    "pools": [{"name": "here", "device": "cpu", "count": 2}],
    "engines": {"count": 1, "threads": 1, "max_slots": 16},
    "trainer": {"threads": 1},
    "functions": {"backend": "local"},
    "environments": {"workers": 0},
}


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process that a recycled id is never taken for: its start, in ticks since boot, is part of its name."""

    pid: int
    started: int
    command: str = field(compare=False)

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)


class Launched:
    """A `rollart launch` under way: what it says, what it started, what it wrote."""

    def __init__(self, home: Path, arguments: list[str]) -> None:
        self._home = home
        self._said = home / f"stderr-{time.monotonic_ns()}.txt"
        self._began = time.monotonic()
        self.seconds = 0.0
        """From before its process began until its end was seen."""
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [*ROLLART, *arguments],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=environment(),
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text(errors="replace")

    @property
    def directory(self) -> Path:
        return self._home / "runs" / "tiny-1"

    def step(self) -> int:
        """The last step of which the ledger knows, -1 before version 0."""
        with contextlib.suppress(sqlite3.Error), ledger(self.directory) as db:
            return int(db.execute("SELECT coalesce(max(step), -1) FROM versions").fetchone()[0])
        return -1

    def until(self, what: Callable[[], object], says: str, limit_s: float = LIMIT_S) -> None:
        """Wait for a condition; fails with what the run said when it ends before, or takes too long."""
        wait(lambda: bool(what()) or self.process.poll() is not None, says, limit_s, self._tell)
        if not what():
            raise AssertionError(f"ended before {says}:\n{self.said}")

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.said, f"it says {text!r}")

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step} is committed")

    def part(self, module: str) -> Process:
        """The youngest child that runs a module, once it is there."""
        found: list[Process] = []

        def look() -> bool:
            found[:] = [p for p in processes(self._home) if f"-m {module}" in p.command or f" {module} " in p.command]
            return bool(found)

        self.until(look, f"{module} runs")
        return max(found, key=lambda p: p.started)

    def worker(self) -> Process:
        """A function worker: a fork of the zygote."""
        found: list[Process] = []

        def look() -> bool:
            zygotes = {p.pid for p in processes(self._home) if ZYGOTE in p.command}
            found[:] = [p for p in processes(self._home) if ZYGOTE in p.command and _parent(p.pid) in zygotes]
            return bool(found)

        self.until(look, "a function worker runs")
        return found[0]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code; every process that it started must be gone with it."""
        try:
            code = self.process.wait(limit_s)
            self.seconds = time.monotonic() - self._began
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {limit_s} s:\n{self._tell()}") from None
        wait(lambda: not processes(self._home), "every process has ended", 60.0, self._tell)
        return code

    def failed(self, code: int, *words: str, limit_s: float = LIMIT_S) -> None:
        """It ends with a code and one line of cause, perhaps one of remedy, with these words in them; no traceback."""
        assert self.end(limit_s) == code, self.said
        told = self.said[self.said.rindex("rollart: ") :]
        assert "Traceback" not in self.said
        assert len(told.splitlines()) <= 2, told
        assert not list(self._home.glob("runs/*/error.log")), told
        for word in words:
            assert word in told, told

    def finished(self) -> None:
        assert self.end() == 0, self.said
        assert "Traceback" not in self.said

    def _tell(self) -> str:
        return "\n".join([self.said, *(f"{p.pid} {p.command[:150]}" for p in processes(self._home)), self._state()])

    def _state(self) -> str:
        """The ledger's counts by state and its last events, for a test that waits in vain."""
        try:
            with ledger(self.directory) as db:
                counts = {
                    table: db.execute(f"SELECT state, count(*) FROM {table} GROUP BY state").fetchall()
                    for table in ("groups", "samples")
                }
                last = db.execute("SELECT t, kind, subject FROM events ORDER BY rowid DESC LIMIT 8").fetchall()
        except sqlite3.Error as error:
            return f"no ledger: {error}"
        return f"step {self.step()}, by state {counts}, last events {last}"


class Home:
    """A private directory with a run file and a cluster file; whatever started in it ends with the test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def launch(self, spec: Spec | None = None, *overrides: str, cluster: Mapping[str, Any] | None = None) -> Launched:
        self.write(spec, cluster)
        return Launched(self.path, ["launch", "run.yaml", "--cluster", "cluster.yaml", *overrides])

    def write(self, spec: Spec | None = None, cluster: Mapping[str, Any] | None = None) -> None:
        """`run.yaml` and `cluster.yaml`."""
        (self.path / "run.yaml").write_text(yaml.safe_dump(spec or tiny()))
        (self.path / "cluster.yaml").write_text(yaml.safe_dump(dict(cluster or CLUSTER)))

    def resume(self, *overrides: str) -> Launched:
        return Launched(self.path, ["launch", "--resume", "tiny-1", *overrides])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A short command, from another shell."""
        return subprocess.run(
            [*ROLLART, *arguments], cwd=self.path, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
        )

    def open(self) -> None:
        """Let what is `held` begin."""
        (self.path / GATE).touch()

    @property
    def directory(self) -> Path:
        return self.path / "runs" / "tiny-1"

    def close(self) -> None:
        for _ in range(3):
            for process in processes(self.path):
                process.kill(signal.SIGKILL)


@contextlib.contextmanager
def ledger(directory: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'ledger.sqlite'}?mode=ro", uri=True)) as connection:
        yield connection


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    with ledger(directory) as db:
        rows = db.execute("SELECT subject, fields FROM events WHERE kind = ? ORDER BY rowid", (kind,)).fetchall()
    return [{"subject": subject, **json.loads(fields)} for subject, fields in rows]


def sound(
    directory: Path, *, steps: int = STEPS, paid: Set[float] = frozenset({1.0, 0.25}), uncharged: Set[str] = frozenset()
) -> None:
    """The journal of a run that reached its end, whatever happened to it: nothing lost, doubled or made up.

    `uncharged`: samples that an older rollart recorded without the rows of their trajectories."""
    with ledger(directory) as db:
        versions = db.execute("SELECT version, step, groups, samples FROM versions ORDER BY version").fetchall()
        consumed = db.execute("SELECT id, grp, v0, version FROM samples WHERE state = 1").fetchall()
        groups = dict(db.execute("SELECT id, version FROM groups WHERE state = 1").fetchall())
        live = db.execute("SELECT count(*) FROM groups WHERE state = 0").fetchone()[0]
        charged = [i for (i,) in db.execute("SELECT id FROM trajectories WHERE outcome = 'finished'")]
        scores = {s for (s,) in db.execute("SELECT score FROM trajectories WHERE score IS NOT NULL")}
    assert [(v, s) for v, s, _, _ in versions] == [(n, n) for n in range(steps + 1)]
    assert [(g, s) for _, _, g, s in versions] == [(0, 0)] + [(GROUPS, BATCH)] * steps
    assert len(consumed) == len({sample for sample, *_ in consumed}) == steps * BATCH
    members = [(group, sample.rpartition(".")[2].partition("r")[0]) for sample, group, *_ in consumed]
    assert len(set(members)) == len(members), "a member of a group was trained twice"
    assert all(groups[group] == version for _, group, _, version in consumed), "a group was split"
    assert all(0 <= version - 1 - v0 <= 1 for *_, v0, version in consumed), "staleness is at most 1"
    rows = Counter(charged)
    assert all(rows[sample] == 1 for sample, *_ in consumed if sample not in uncharged), (
        "a trained sample has no trajectory, or two"
    )
    assert live == 0, "a group was left behind"
    assert scores <= paid, "a fault was counted as a reward"
    with LedgerReader(directory) as reader:
        broken = [one for one in verify(reader).violations if one.row not in uncharged]
    assert broken == [], "the audit of the ledger"


def waiting_samples(directory: Path) -> dict[str, int]:
    """Finished samples that no step has consumed, with the version of their first token."""
    with ledger(directory) as db:
        return dict(
            db.execute(
                "SELECT s.id, s.v0 FROM samples s JOIN groups g ON g.id = s.grp WHERE s.state = 0 AND g.state = 0"
            ).fetchall()
        )


def wait(done: Callable[[], bool], says: str, limit_s: float, tell: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {says}\n{tell()}")
        time.sleep(POLL_S)


def processes(home: Path) -> list[Process]:
    """Every live process that belongs to a test: its command, environment or working directory names its home."""
    found = []
    mark = os.fsencode(home)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            cwd = os.fsencode(os.readlink(entry / "cwd"))
            ours = mark in command or mark in cwd
        except OSError:
            continue
        started = _started(int(entry.name))
        if ours and started is not None:
            found.append(Process(int(entry.name), started, command.replace(b"\0", b" ").decode(errors="replace")))
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


ROLLART = [sys.executable, "-m", "rollart.cli.main"]
ZYGOTE = "serverless.workers._zygote"


def _set(spec: Spec, keys: list[str], value: Any) -> None:
    here: Any = spec
    for key in keys[:-1]:
        here = here[int(key)] if isinstance(here, list) else here.setdefault(key, {})
    if isinstance(here, list):
        here[int(keys[-1])] = value
    else:
        here[keys[-1]] = value


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that is gone or waits to be reaped."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
