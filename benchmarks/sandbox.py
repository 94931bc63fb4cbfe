"""The cost of running a generated program in the sandbox, beside a new interpreter for each.

    python benchmarks/sandbox.py [--programs 300] [--json]

For each kind of isolation that works here: seconds to the first program, wall time per warm program (median and 99th
percentile; target: p50 below 30 ms), CPU milliseconds per program of everything that took part (the caller, the
supervisor, the program), programs per second with two sandboxes under asyncio, and the restart after a program that
leaves more than is cleaned up. The programs read a line, sort 10,000 numbers and print: about 2 ms of their own.
`new python` and `new bwrap` start an interpreter per program (no limits, no seccomp): the time that the warm zygote
saves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from serverless.errors import SandboxUnavailable
from serverless.sandbox import Limits, sandbox

PROGRAM = """
n = int(input())
xs = sorted((i * 7919) % 10007 for i in range(n))
print(xs[0], xs[-1])
"""
STDIN, STDOUT = "10000\n", "0 10006\n"
DIRTY = "for n in range(3000): open(f'f{n}', 'w').close()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for rung in ("bubblewrap", "landlock") for row in sandboxed(rung, options.programs)]
    rows += [row for row in (fresh("new python", []), fresh("new bwrap", bwrap())) if row]
    result = {"load": os.getloadavg()[0], "programs": options.programs, "rows": rows}
    print(json.dumps(result, indent=1) if options.json else table(result))
    if any(row["p50_ms"] >= 30.0 for row in rows if "first_ms" in row):
        sys.exit(1)


def sandboxed(rung: str, programs: int) -> list[dict[str, Any]]:
    rows = []
    for preload in ((), ("numpy",)):
        name = f"{rung}{' + ' if preload else ''}{'+'.join(preload)}"
        try:
            rows.append({"way": name, **_sandboxed(rung, preload, programs)})
        except SandboxUnavailable as error:
            print(f"{name}: {error.message}", file=sys.stderr)
    return rows


def _sandboxed(rung: str, preload: tuple[str, ...], programs: int) -> dict[str, Any]:
    cpu = cpu_seconds()
    began = time.perf_counter()
    with sandbox(rung, preload=preload) as box:
        check(box.run(PROGRAM, STDIN).stdout)
        first = time.perf_counter() - began
    start_cpu = cpu_seconds() - cpu
    cpu = cpu_seconds()
    with sandbox(rung, preload=preload) as box:
        took = timed(lambda: check(box.run(PROGRAM, STDIN).stdout), programs)
        own = [box.run(PROGRAM, STDIN).cpu_s for _ in range(20)]
    used = cpu_seconds() - cpu - start_cpu
    with sandbox(rung, preload=preload) as box:
        box.run(DIRTY)
        began = time.perf_counter()
        check(box.run(PROGRAM, STDIN).stdout)
        restart = time.perf_counter() - began
    rate = asyncio.run(_rate(rung, preload, programs))
    return {
        "first_ms": first * 1e3,
        **took,
        "cpu_ms": used / (programs + 20) * 1e3,
        "own_cpu_ms": statistics.median(own) * 1e3,
        "per_s": rate,
        "restart_ms": restart * 1e3,
    }


async def _rate(rung: str, preload: tuple[str, ...], programs: int) -> float:
    async with sandbox(rung, preload=preload, size=2, limits=Limits()) as boxes:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(boxes.run(PROGRAM, STDIN)) for _ in range(programs)]
        seconds = time.perf_counter() - began
        for task in tasks:
            check(task.result().stdout)
    return programs / seconds


def fresh(name: str, head: list[str] | None) -> dict[str, Any] | None:
    """An interpreter per program."""
    if head is None:
        return None
    command = [*head, os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]

    def one() -> None:
        check(subprocess.run(command, input=STDIN, capture_output=True, text=True, check=True).stdout)

    cpu = cpu_seconds()
    took = timed(one, 40)
    # bwrap exits before the process that it waits for is reaped, so its CPU time is not counted anywhere.
    return {"way": name, **took, **({} if head else {"cpu_ms": (cpu_seconds() - cpu) / 40 * 1e3})}


def bwrap() -> list[str] | None:
    if shutil.which("bwrap") is None:
        return None
    binds = [part for path in ("/usr", "/lib", "/lib64", sys.base_prefix) for part in ("--ro-bind", path, path)]
    return ["bwrap", "--unshare-all", "--die-with-parent", *binds]


def timed(run: Callable[[], None], times: int) -> dict[str, float]:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    return {"p50_ms": statistics.median(took), "p99_ms": took[int(len(took) * 0.99)]}


def cpu_seconds() -> float:
    """Of this process and of those of its children that have ended, with all that these waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def check(stdout: str) -> None:
    if stdout != STDOUT:
        raise AssertionError(f"the program printed {stdout!r}")


def table(result: dict[str, Any]) -> str:
    columns = ["way", "first_ms", "p50_ms", "p99_ms", "cpu_ms", "own_cpu_ms", "per_s", "restart_ms"]
    lines = [f"load {result['load']:.2f}, {result['programs']} programs each", " ".join(f"{c:>20}" for c in columns)]
    for row in result["rows"]:
        shown = [row["way"], *(f"{row[c]:.1f}" if c in row else "" for c in columns[1:])]
        lines.append(" ".join(f"{text:>20}" for text in shown))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
