"""A fleet on this machine: the quickstart on a faked Ray cluster of three kinds of hosts, one of which is killed.

    python benchmarks/fleet_demo.py [KEY=VALUE ...]        (`make fleet-demo`)

Two engines in pools of different labels, the trainer and the workers of reward functions in a third. Half-way the
raylet of the node that holds engine-0 is killed with -9, as a host that loses power; the engine goes on at the other
host of its pool. Then the success reached, the nodes of every part, and lost seconds by cause. Exit code 1 if any of
these misses its expectation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rollart.errors import RollartError
from rollart.ledger.reader import LedgerReader
from rollart.report.rows import collect
from rollart.report.utilization import utilization
from rollart.testing.clusters import raylet_pid

ENGINE, FUNCTIONS = "engine-0", "reward-0"
ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "configs/clusters/ray-fake.yaml"

LEARNED = 0.75
"""Held-out success that both domains of the quickstart reach with any seed that was tried (docs/training.md)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--learned", type=float, default=LEARNED, help="success that both domains must reach")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollart-fleet-") as home:
        directory = Path(home) / "fleet"
        command = [sys.executable, "-m", "rollart.cli.main", "launch", "--cluster", str(CLUSTER), "--name", "fleet"]
        launched = subprocess.Popen([*command, "--runs-dir", home, *arguments.overrides], start_new_session=True)
        try:
            killed = kill_half_way(launched, directory)
            code = launched.wait()
        finally:
            if launched.poll() is None:
                launched.terminate()
                launched.wait()
        return code or print_result(directory, killed, arguments.learned)


def kill_half_way(launched: subprocess.Popen[bytes], directory: Path) -> str:
    """The node that was killed, '' if the run ended before."""
    while launched.poll() is None:
        with contextlib.suppress(RollartError, KeyError), LedgerReader(directory) as reader:
            steps, step = reader.config()["run"]["steps"], reader.facts().step
            if step is not None and 2 * step >= steps:
                node = places(reader, ENGINE)[-1]
                print(f"-- step {step} of {steps}: node {node}, which holds {ENGINE}, is killed --", file=sys.stderr)
                os.kill(raylet_pid(directory / "ray", node), signal.SIGKILL)
                return node
        time.sleep(0.1)
    return ""


def places(reader: LedgerReader, part: str) -> list[str]:
    """The nodes that a part was on, in order."""
    return [str(e.fields["node"]) for e in reader.events("actor_placed") if e.subject == part]


def print_result(directory: Path, killed: str, learned: float) -> int:
    """Print the result; 1 if a part of it misses its expectation."""
    with LedgerReader(directory) as reader:
        rows = collect(reader, "fleet")
        where = {part: places(reader, part) for part in ("engine-0", "engine-1", "trainer-0", FUNCTIONS)}
        lost = [e.subject for e in reader.events("node_lost")]
        causes = {e.subject: str(e.fields["cause"]) for e in reader.events("engine_lost")}
        ends = [e for e in reader.events("evaluation") if e.fields["label"] == "end"]
    down = next(t for t in utilization(rows).tables if t.name == "down").rows
    success = {e.subject: float(e.fields["success"] or 0.0) for e in ends}
    print("\nfleet demo")
    for part, nodes in where.items():
        print(f"  {part} ran on {', then '.join(nodes)}")
    print(f"  nodes lost: {', '.join(lost) or 'none'}")
    for engine, cause in causes.items():
        print(f"  {engine} was lost: {cause}")
    for cause, resource, seconds in down:
        print(f"  {resource} lost {seconds:.1f} s: {cause}")
    for domain, rate in success.items():
        print(f"  held-out success of {domain}: {rate:.2f}")
    wrong = [
        claim
        for claim, fine in {
            "a node was killed": bool(killed) and killed in lost,
            "the engine went on elsewhere": where[ENGINE][-1] not in ("", killed) and len(where[ENGINE]) > 1,
            "engines in pools of different labels": len({nodes[0].rpartition("-")[0] for nodes in where.values()}) == 3,
            "function workers in the pool of cores": [n.rpartition("-")[0] for n in where[FUNCTIONS]] == ["cores"],
            "lost seconds with a cause": any(resource == ENGINE for _, resource, _ in down),
            f"success of at least {learned} in two domains": len(success) == 2 and min(success.values()) >= learned,
        }.items()
        if not fine
    ]
    print(f"  not as it should be: {'; '.join(wrong)}" if wrong else "  all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
