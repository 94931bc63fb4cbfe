"""Calibrate this machine, predict runs that it has never run, run them, and compare: trajectories/s.

    python benchmarks/local_prediction.py [--only NAME ...] [--repeat 1] [--save FILE | --machine FILE] [--json]

Calibration: the engine and the trainer alone on synthetic work, then three short runs of the quickstart's model with
other mixes. The runs that are predicted differ from these in domains, lengths, batch, epochs, mini-batches, staleness
or the speed of the environment. The shape of their trajectories is taken from the references where the domain is
the same, and else found by playing its environment, at random or by worked examples, without any model. `with its own
profile` is the prediction from the profile that the run turned out to have, which leaves only the machine's model to
blame. Rates are of trained trajectories between publishes, in the steady part. Everything runs on the clock of a
machine that is shared with whatever else runs: look at the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from placement.problem import DomainProfile
from rollart.adapters.envs.frozen_lake import FrozenLakeText
from rollart.model import Step
from rollart.settings.load import builtin
from rollart.settings.resolve import Resolved, resolve_files
from rollart.tools.calibrate import Machine, SteadyStateMeasurement, calibrate, measure
from rollart.tools.predict import predict, profile_by_play

STEP_S = 0.15


class SlowLake(FrozenLakeText):
    """Frozen lake on a server that takes its time."""

    async def step(self, action: str) -> Step:
        await asyncio.sleep(STEP_S)
        return await super().step(action)


def reference_mixed(run: dict[str, Any]) -> None:
    """The quickstart's mix in a small batch, words of 4 to 6 letters, one epoch."""
    quota(run, lake=24, spell=48)
    run["training"]["epochs"] = 1
    words = run["domains"][1]
    words["max_tokens"] = 32
    words["environment_args"]["config"] = {"min_word_len": 4, "max_word_len": 6}


def reference_games(run: dict[str, Any]) -> None:
    """Twice as many games as words, two epochs in four mini-batches."""
    quota(run, lake=128, spell=64)
    run["training"] |= {"epochs": 2, "minibatches": 4}


def reference_words(run: dict[str, Any]) -> None:
    """Words of 2 and 3 letters alone, one epoch."""
    quota(run, spell=160)
    run["training"]["epochs"] = 1
    run["domains"][0]["environment_args"]["config"] = {"min_word_len": 2, "max_word_len": 3}


def lake_only(run: dict[str, Any]) -> None:
    """Games alone, a smaller batch, three epochs in four mini-batches."""
    quota(run, lake=112)
    run["training"] |= {"epochs": 3, "minibatches": 4}


def long_words(run: dict[str, Any]) -> None:
    """Words of 6 to 8 letters alone, up to two versions stale, one epoch in one mini-batch."""
    quota(run, spell=144)
    run["staleness"] = 2
    run["training"] |= {"epochs": 1, "minibatches": 1}
    words = run["domains"][0]
    words["max_tokens"] = 48
    words["environment_args"]["config"] = {"min_word_len": 6, "max_word_len": 8}


def slow_games(run: dict[str, Any]) -> None:
    """Games whose every move takes 0.15 s, a third of the batch; one epoch."""
    quota(run, lake=32, spell=64)
    run["domains"][0] |= {"environment": "local_prediction:SlowLake"}
    run["training"]["epochs"] = 1


REFERENCES = (reference_mixed, reference_games, reference_words)
UNSEEN = {f.__name__: f for f in (lake_only, long_words, slow_games)}


def variant(edit: Callable[[dict[str, Any]], None], directory: Path, *, steps: int) -> Resolved:
    """The quickstart with changes, resolved for this machine as `rollart launch` would."""
    run = yaml.safe_load(Path(builtin("runs/quickstart.yaml")).read_text())
    run |= {"steps": steps, "evaluation": {"episodes": 0}}
    edit(run)
    run["batch"]["trajectories"] = sum(d["trajectories"] for d in run["domains"])
    path = directory / f"{edit.__name__}.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return resolve_files(path)


def quota(run: dict[str, Any], **trajectories: int) -> None:
    """Set trajectories per step by domain. A domain that is not named is left out, with the parts that only it
    needs."""
    names = {"lake": "frozen_lake", "spell": "spell_backward"}
    wanted = {names[short]: count for short, count in trajectories.items()}
    run["domains"] = [d | {"trajectories": wanted[d["name"]]} for d in run["domains"] if d["name"] in wanted]
    used = {reward["function"] for d in run["domains"] for reward in d["rewards"]}
    run["functions"] = [f for f in run["functions"] if f["name"] in used]
    if "spell_backward" not in wanted:
        del run["warm_start"]


Known = dict[str, DomainProfile]
"""Profiles of the reference runs by `_domain_key`."""


def compare(name: str, machine: Machine, known: Known, directory: Path, *, steps: int) -> dict[str, Any]:
    """Predict one run, then run it."""
    resolved = variant(UNSEEN[name], directory, steps=steps)
    played = asyncio.run(profile_by_play(resolved, directory / name))
    # Waits of a reference's trajectories depend on that run's load, so the environment's time is the played one.
    expected = [replace(known.get(_domain_key(resolved, p.name), p), environment=p.environment) for p in played]
    before = predict(resolved, expected, machine)
    measured = measure(resolved)
    own = [replace(p, environment=q.environment) for p, q in zip(measured.profiles, played, strict=True)]
    after = predict(resolved, own, machine)
    return {
        "run": name,
        "predicted": before.rate,
        "measured": measured.rate,
        "error": before.rate / measured.rate - 1,
        "with_its_own_profile": after.rate,
        "error_with_its_own_profile": after.rate / measured.rate - 1,
        "binds": before.binds,
        "step_predicted": _step(before.cpu["trainer"] * measured.batch, machine.publish_s, before.step_s),
        "step_measured": _step(
            measured.train.cpu_s, measured.publish_s, measured.train.cpu_s + measured.publish_s + measured.handover_s
        ),
        "cpu_predicted": dict(before.cpu),
        "cpu_measured": dict(measured.cpu),
        "steps": measured.steps,
        "seconds": measured.seconds,
        "load": os.getloadavg()[0],
    }


def _step(cpu_s: float, publish_s: float, step_s: float) -> dict[str, float]:
    """A training step in its parts."""
    return {"trainer": cpu_s, "publish": publish_s, "hand-over": step_s - cpu_s - publish_s}


def _domain_key(resolved: Resolved, name: str) -> str:
    """The same for two domains of which trajectories have the same shape."""
    domain = resolved.run.domain(name)
    return repr((name, domain.environment, domain.environment_args, domain.max_turns, domain.max_tokens))


def seen(references: Sequence[Resolved], runs: Sequence[SteadyStateMeasurement]) -> Known:
    return {_domain_key(r, p.name): p for r, run in zip(references, runs, strict=True) for p in run.profiles}


def show(result: Mapping[str, Any]) -> None:
    def pairs(figure: str) -> str:
        before, after = result[f"{figure}_predicted"], result[f"{figure}_measured"]
        return "  ".join(f"{part} {1e3 * value:.3g}/{1e3 * after.get(part, 0.0):.3g}" for part, value in before.items())

    print(
        f"{result['run']:<11} predicted {result['predicted']:6.1f}/s  measured {result['measured']:6.1f}/s  "
        f"error {result['error']:+6.1%}  with its own profile {result['error_with_its_own_profile']:+6.1%}  "
        f"load {result['load']:.1f}  bound by: {result['binds']}\n"
        f"            predicted/measured: ms of CPU per trajectory: {pairs('cpu')}\n"
        f"                                ms of a training step: {pairs('step')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(UNSEEN), default=list(UNSEEN))
    parser.add_argument("--machine", type=Path, help="use this calibration")
    parser.add_argument("--save", type=Path, help="write the calibration here")
    parser.add_argument("--repeat", type=int, default=1, help="calibrate and compare so many times")
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for _ in range(arguments.repeat):
            known: Known = {}
            if arguments.machine:
                machine = Machine.from_dict(json.loads(arguments.machine.read_text()))
            else:
                references = [variant(edit, directory, steps=20) for edit in REFERENCES]
                machine, runs = calibrate(references[0], references, out=arguments.save)
                known = seen(references, runs)
            if not arguments.json:
                print(f"load {os.getloadavg()[0]:.1f}, engine fit ±{machine.engine.calibration.error:.0%}", flush=True)
            for name in arguments.only:
                results.append(compare(name, machine, known, directory, steps=arguments.steps))
                if not arguments.json:
                    show(results[-1])
    if arguments.json:
        json.dump(results, sys.stdout, indent=2)
        return
    worst = max(abs(r["error"]) for r in results)
    print(f"largest error {worst:.1%}, mean {sum(abs(r['error']) for r in results) / len(results):.1%}")


if __name__ == "__main__":
    main()
