"""The schedule `paced` beside `rollart`, `areal` and `sync_plus`: trained against drawn trajectories, and throughput.

    python benchmarks/paced.py [--staleness 3] [--seeds 0 1 2 3 4] [--policies paced,rollart,areal] [--plan paced]

Simulates configs/runs/agentic-math-32b.yaml on configs/clusters/rollart-96h800-32h20.yaml. Of the steps after
the warm-up (2 (alpha + 1) steps) and before the last alpha + 1, in which a run starts no more than it consumes, it
compares the trained trajectories with all drawn trajectories of the run: the two-sample Kolmogorov-Smirnov
distance of generated tokens and the ratio of their means, per domain. The length of a trajectory is drawn by (seed,
prompt, member) whatever its outcome, so lost ones are known too. `ks_null` is the distance of a random sample. Each
seed ends with a row of the targets of `paced` and its results.

Seconds and samples of the quickstart under these schedules are those of learning.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parent.parent
RUN, CLUSTER = "configs/runs/agentic-math-32b.yaml", "configs/clusters/rollart-96h800-32h20.yaml"


def ks(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest distance of the two empirical distributions."""
    a, b = sorted(a), sorted(b)
    return max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in {*a, *b})


def null(asked: Sequence[float], groups: int, size: int, draws: int = 20) -> float:
    """Null model: the median distance of as many groups, sampled at random from all drawn groups."""
    whole = [asked[i : i + size] for i in range(0, len(asked), size)]
    random = Random(0)
    return statistics.median(ks(asked, [x for g in random.sample(whole, groups) for x in g]) for _ in range(draws))


def simulated(policy: str, staleness: int, seed: int, steps: int, plan: str = "") -> dict[str, Any]:
    """One simulation: samples per second, and trained against drawn trajectories per domain. `plan`: the schedule for
    which the engines are planned; '': `policy` itself."""
    from rollart.ledger.reader import LedgerReader
    from rollart.settings.resolve import forecast, read_specs
    from rollart.tools.simulate import simulate, workload

    keys = [f"schedule={plan or policy}", f"staleness={staleness}"]
    resolved = forecast(read_specs(ROOT / RUN, ROOT / CLUSTER, keys))
    first, last = 2 * (staleness + 1), steps - staleness - 1
    with tempfile.TemporaryDirectory() as directory:
        done = simulate(resolved, Path(directory), schedule=policy, steps=steps, seed=seed)
        with LedgerReader(done.directory) as reader:
            dropped = Counter(str(e.fields["reason"]) for e in reader.events("group_dropped"))
            deferred = Counter(e.subject for e in reader.events("admission_deferred"))
            waits = [float(e.fields["seconds"] or 0) for e in reader.events("batch_paced")]
        ledger = sqlite3.connect(done.directory / "ledger.sqlite")
        groups = ledger.execute("SELECT domain, seed FROM groups").fetchall()
        trained = ledger.execute("SELECT domain, version, action_tokens FROM samples WHERE version NOT NULL").fetchall()
        outcomes = Counter(
            dict(ledger.execute("SELECT outcome, count(*) FROM trajectories GROUP BY outcome").fetchall())
        )
        ledger.close()
    seconds = done.steps[last - 1].ended - done.steps[first - 1].ended
    row: dict[str, Any] = {
        "policy": policy,
        "staleness": staleness,
        "plan": plan or policy,
        "seed": seed,
        "steps": last - first,
        "load": os.getloadavg()[0],
        "step_s": seconds / (last - first),
        "samples_per_s": sum(s.trajectories for s in done.steps[first:last]) / seconds,
        "tokens_per_s": sum(s.tokens for s in done.steps[first:last]) / seconds,
        "groups_dropped": dict(dropped),
        "attempts_stale": outcomes["stale"] + outcomes["group_dropped"],
        "waited_s": sum(waits),
        "most_deferrals": max(deferred.values(), default=0),
        "domains": {},
    }
    for domain in resolved.run.domains:
        work = workload(resolved, domain.name, seed, None)
        asked = [
            float(sum(work.script(prompt, member).answers))
            for name, prompt in groups
            if name == domain.name
            for member in range(domain.group_size)
        ]
        got = [float(tokens) for name, v, tokens in trained if name == domain.name and first < v <= last]
        row["domains"][domain.name] = {
            "drawn": statistics.fmean(asked),
            "trained": statistics.fmean(got),
            "ks": ks(asked, got),
            "ks_null": null(asked, len(got) // domain.group_size, domain.group_size),
        }
        row["generated_per_s"] = row.get("generated_per_s", 0.0) + sum(got) / seconds
    return row


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`paced` of one seed against its targets."""
    by_policy = {row["policy"]: row for row in rows}
    paced, rate = by_policy["paced"], {name: row["samples_per_s"] for name, row in by_policy.items()}
    domains = paced["domains"].values()
    found = {
        "ks (at most 0.05)": max(d["ks"] for d in domains),
        "mean (within 0.05)": max(abs(d["trained"] / d["drawn"] - 1) for d in domains),
        "lost (0)": paced["attempts_stale"] + sum(paced["groups_dropped"].values()),
        "deferrals of a prompt (at most 1)": paced["most_deferrals"],
    }
    targets = {"rollart": "above 1", "areal": "at least 0.9"}
    found |= {f"rate over {p}'s ({t})": rate["paced"] / rate[p] for p, t in targets.items() if p in rate}
    return {"seed": paced["seed"], "staleness": paced["staleness"], "targets": found}


def recommendation() -> int:
    """The staleness that the plan recommends."""
    from rollart.settings.resolve import forecast, read_specs
    from rollart.tools.window import recommended_staleness

    found = recommended_staleness(forecast(read_specs(ROOT / RUN, ROOT / CLUSTER, [])))
    assert found is not None, "the example has a window of groups"
    return found.staleness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="paced,rollart,areal")
    parser.add_argument("--plan", default="", help="the schedule whose planned engines all of them have; else its own")
    parser.add_argument("--staleness", type=int, help="default: what `rollart plan` recommends")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="default: 30 beside the warm-up and the last ones")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    staleness = recommendation() if arguments.staleness is None else arguments.staleness
    steps = arguments.steps or 30 + 3 * (staleness + 1)
    for seed in arguments.seeds:
        rows = []
        for policy in policies:
            rows.append(simulated(policy, staleness, seed, steps, arguments.plan))
            print(json.dumps(rows[-1]), flush=True)
        if "paced" in policies:
            print(json.dumps(judged(rows)), flush=True)


if __name__ == "__main__":
    main()
