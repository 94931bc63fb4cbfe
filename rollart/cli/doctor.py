"""`rollart doctor`: check that this machine can run rollart, and list the installed extras. What only some checks need
is imported in them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollart.cli.context import print_report, split_arguments
from rollart.errors import RunFailed, UsageError
from rollart.report.tables import Report, Table
from rollart.settings.cluster import PYTHON_VARIABLE
from serverless.sandbox import detect, required

EXTRAS = {
    "torch": "local: the embedded engine and trainer",
    "transformers": "local: model configurations",
    "gymnasium": "envs",
    "reasoning-gym": "envs",
    "peft": "lora",
    "jinja2": "proxy: chat templates",
    "aiobotocore": "aws",
    "modal": "modal",
    "ray": "ray",
    "matplotlib": "`report curve --png`",
    "pyarrow": "`trajectories --export FILE.parquet`",
}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One finding: `ok`, `missing` (something optional), `fails` (nothing will run)."""

    subject: str
    result: str
    detail: str


def doctor(arguments: tuple[str, ...], cluster: Path | None, output: str, runs_dir: Path) -> None:
    checks = [*_machine(runs_dir), *_sandbox_findings(), *_extras(), _vllm(), *_run_requirements(arguments, cluster)]
    table = Table.of("checks", "Checks", ({"what": c.subject, "result": c.result, "detail": c.detail} for c in checks))
    print_report(Report("doctor", platform.node(), (table,)), output)
    failed = [c.subject for c in checks if c.result == "fails"]
    if failed:
        raise RunFailed(f"this machine cannot run rollart: {', '.join(failed)}")


def _sandbox_findings() -> Iterator[DoctorFinding]:
    """Sandboxes for code that the policy wrote, best first; each is tried."""
    for rung in detect():
        use = "for untrusted rewards" if rung.name != "unsafe" else "no isolation: only where a spec allows it"
        yield DoctorFinding(f"sandbox {rung.name}", "ok" if rung.available else "missing", rung.why_not or use)
    wall = bool(required.order("untrusted", allow_unsafe=False))
    has = "no network and no files of the host, also beside the sandbox"
    why = "they contain what they run in the sandbox, and only that"
    yield DoctorFinding("wall of untrusted workers", "ok" if wall else "missing", has if wall else why)


def _machine(runs: Path) -> Iterator[DoctorFinding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield DoctorFinding("python", "ok" if sys.version_info >= (3, 11) else "fails", f"{version} (3.11 or later)")
    yield DoctorFinding("system", "ok" if sys.platform == "linux" else "fails", platform.platform())
    cores = len(os.sched_getaffinity(0))
    yield DoctorFinding("cores", "ok" if cores >= 2 else "missing", f"{cores} usable (the local cluster takes 2)")
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    memory = next((int(size) / 2**20 for name, size, *_ in lines if name == "MemAvailable:"), 0.0)
    yield DoctorFinding(
        "memory", "ok" if memory >= 2 else "missing", f"{memory:.1f} GiB available (the quickstart takes 2)"
    )
    existing = next(p for p in (runs, *runs.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    writable = os.access(existing, os.W_OK)
    detail = f"{free:.1f} GiB free{'' if writable else ', not writable'} at {existing}"
    yield DoctorFinding("disk", "ok" if free >= 1 and writable else "fails", detail)
    yield DoctorFinding("sqlite", "ok" if sqlite3.sqlite_version_info >= (3, 35) else "fails", sqlite3.sqlite_version)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield DoctorFinding("ports", "ok", f"127.0.0.1 can listen (tried {server.getsockname()[1]})")
    except OSError as error:
        yield DoctorFinding("ports", "fails", f"127.0.0.1 cannot listen: {error.strerror}")


def _extras() -> Iterator[DoctorFinding]:
    for package, purpose in EXTRAS.items():
        try:
            yield DoctorFinding(package, "ok", f"{importlib.metadata.version(package)} ({purpose})")
        except importlib.metadata.PackageNotFoundError:
            yield DoctorFinding(package, "missing", f"not installed ({purpose})")


def _run_requirements(arguments: tuple[str, ...], cluster: Path | None) -> Iterator[DoctorFinding]:
    """Requirements of a run's spec."""
    if not arguments and cluster is None:
        return
    from rollart.launch.requirements import requirements
    from rollart.settings.resolve import resolve_files

    run, overrides = split_arguments(arguments)
    for need in requirements(resolve_files(run, cluster, overrides)):
        missing = "fails" if need.needed else "missing"
        detail = need.asked if need.here else f"{need.asked}: {need.remedy}"
        yield DoctorFinding(f"this run: {need.module}", "ok" if need.here else missing, detail)


def _vllm() -> DoctorFinding:
    """vLLM, which is installed in a separate environment."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        return DoctorFinding("vllm", "missing", f"{PYTHON_VARIABLE} names no interpreter (engines of kind vllm)")
    from rollart.launch.vllm import vllm_home

    try:
        home = vllm_home(python)
    except UsageError as error:
        return DoctorFinding("vllm", "missing", str(error))
    if not home.version:
        return DoctorFinding("vllm", "missing", f"not installed for {python}")
    plugin = "with rollart's plugin" if home.plugin else "without rollart's plugin (integrations/vllm)"
    nixl = "with nixl" if home.nixl else "without nixl (prefill and decode apart)"
    return DoctorFinding("vllm", "ok" if home.plugin else "missing", f"{home.version}, {plugin}, {nixl}: {python}")
