"""A bundled training step, repeated: its reward functions on this machine, its loss by the trainer's own program, and
the comparison with what the ledger recorded.

Rewards must be equal, but for the rounding of functions that compute with all items of a call at once. A step on the
CPU repeats bit for bit on a processor and with libraries like those of the bundle (`SAME_BITS`): then the advantages,
the loss and the gradient's norm must be equal too, else within a relative tolerance. The terms of a loss cancel
(advantages have a mean of 0), so its scale is that of the mean absolute advantage where that is larger.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollart.adapters.clusters.program import Program
from rollart.adapters.trainers.http import HttpTrainer
from rollart.architecture import version_path
from rollart.errors import PartDied, RunFailed, TrainerError, UsageError, did_you_mean
from rollart.ledger.kept import KeptTrajectory
from rollart.model import ModelFault, Outcome, Scored, TrainSample, WeightsRef
from rollart.report.rescore import RescoredItem, Rescoring, rescore_report
from rollart.report.tables import Report, Row, as_count, as_number, as_text, table
from rollart.report.trajectories.view import outcome_text
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.training import TrainerConfig
from rollart.tools.bundle import SAME_BITS, BundleManifest, StepBundle, recorded_outcome, rewarded_batch, this_machine
from rollart.tools.rescore import rescore
from serverless.deploy.package import Package
from serverless.history import is_same

TOLERANCE = 1e-6
"""Relative difference of float32 sums over a batch that were added up in another order."""

MEASURED = ("cpu_seconds", "exposed_seconds", "peak_gb", "largest_microbatch")
"""Metrics of the machine, which no replay repeats."""

LOSS, ADVANTAGES, NORM = "loss", "advantage_abs", "grad_norm"

COMPARED = (ADVANTAGES, LOSS, NORM)
"""Metrics that must agree on every machine, beside those of rewards; in the order in which a step computes them."""


@dataclass(frozen=True, slots=True)
class ReplayedMetric:
    """A metric of the step as recorded and as repeated; None where it is missing."""

    name: str
    recorded: float | None
    replayed: float | None
    differs: bool


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A repeated step. `items`: by function, the trajectories that it was called with again, or another one in its
    place (`rescorings`); `alone`: functions that score each item alone. `tolerance`: 0 where bits must be equal, for
    the reason `why`. `failure`: of the trainer, '' for none; `fault`: the reward without which nothing was
    trained."""

    manifest: BundleManifest
    kept: tuple[KeptTrajectory, ...]
    items: Mapping[str, tuple[RescoredItem, ...]]
    rescorings: tuple[Rescoring, ...]
    alone: frozenset[str]
    metrics: tuple[ReplayedMetric, ...]
    tolerance: float
    why: str
    failure: str = ""
    fault: str = ""

    @property
    def first_difference(self) -> str:
        """The first difference, in the order in which a step computes: rewards, advantages, loss; '' for none."""
        for function, items in self.items.items():
            for item in items:
                if reward_differs(item, exact=function in self.alone):
                    old, new = _paid_text(item.old.outcome), _paid_text(item.answers[0])
                    return f"reward '{function}' of {item.kept.id} is {new}, recorded {old}"
        for metric in self.metrics:
            if metric.differs:
                return f"{metric.name} is {_number_text(metric.replayed)}, recorded {_number_text(metric.recorded)}"
        if self.failure != self.manifest.failure:
            return f"the trainer {_ended(self.failure)}, recorded: it {_ended(self.manifest.failure)}"
        return self.fault


async def replay_step(
    bundle: StepBundle,
    *,
    rewards: Sequence[Package] = (),
    device: str = "cpu",
    tolerance: float | None = None,
    allow_unsafe: bool = False,
) -> StepReplay:
    """Repeat a step. `rewards`: functions in place of the bundle's with their names, or of its only one; what they pay
    is trained. `tolerance`: of advantages, loss and norm, in place of equal bits where these can be expected."""
    manifest = bundle.manifest
    functions = ClusterFunctions().model_copy(update={"allow_unsafe": allow_unsafe})
    packages = {name: package for name, package in bundle.packages.items() if not manifest.functions[name].why}
    substitutes = _substitutes(bundle, rewards)
    called = [await _called(bundle, name, one, functions) for name, one in sorted((packages | substitutes).items())]
    items = {rescoring.old: rescoring.items for rescoring in called}
    samples: Sequence[TrainSample] | str = bundle.samples
    if substitutes:
        samples = _paid_again(bundle, {(n, item.kept.id): item.answers[0] for n in substitutes for item in items[n]})
    expected, why = _tolerance(bundle, device)
    found = StepReplay(
        manifest,
        bundle.kept,
        items,
        tuple(one for one in called if one.old in substitutes),
        frozenset(name for name, package in (packages | substitutes).items() if package.spec.batch.max_items == 1),
        (),
        expected if tolerance is None else tolerance,
        why,
    )
    if isinstance(samples, str):
        return replace(found, fault=samples)
    if not manifest.weights:
        return found
    try:
        metrics = await _trained(bundle, samples, device)
    except TrainerError as error:
        return replace(found, failure=str(error))
    return replace(found, metrics=tuple(compare_metrics(manifest.metrics or {}, metrics, found.tolerance)))


def compare_metrics(
    recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float
) -> Iterator[ReplayedMetric]:
    """The metrics of both sides, those that must agree first: the others follow from them. Pure."""
    names = {name for name in (*recorded, *replayed) if name not in MEASURED}
    scale = abs(recorded.get(ADVANTAGES, 0.0))
    for name in sorted(names, key=_rank):
        a, b = recorded.get(name), replayed.get(name)
        if not recorded:
            differs = False
        elif a is None or b is None:
            differs = True
        else:
            bound = tolerance * max(abs(a), abs(b), scale if name == LOSS else 0.0)
            differs = _must_agree(name) and not (_same(a, b) or abs(a - b) <= bound)
        yield ReplayedMetric(name, a, b, differs)


def _must_agree(name: str) -> bool:
    return name in COMPARED or name.startswith("reward/")


def _rank(name: str) -> tuple[int, str]:
    place = -1 if name.startswith("reward/") else COMPARED.index(name) if name in COMPARED else len(COMPARED)
    return place, name


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def reward_differs(item: RescoredItem, *, exact: bool) -> bool:
    """True if the new answer pays another reward than the recorded one: in any bit if `exact`, else by more than the
    rounding of arithmetic whose arrays hold the other items of a call."""
    old, new = item.old.outcome, item.answers[0]
    if exact or paid(old) is None or paid(new) is None:
        return paid(old) != paid(new)
    return not is_same(old, new)


def paid(outcome: Outcome) -> tuple[float, tuple[float, ...] | None] | None:
    """The part of an outcome that a trainer's batch is made of: the score, and those of its steps; None for a fault of
    the platform."""
    match outcome:
        case Scored():
            return outcome.value, outcome.steps
        case ModelFault():
            return outcome.floor, None
    return None


def _paid_text(outcome: Outcome) -> str:
    return repr(outcome.value) if isinstance(outcome, Scored) else outcome_text(outcome)


def _number_text(value: float | None) -> str:
    return "missing" if value is None else repr(value)


def _ended(failure: str) -> str:
    return f"failed: {failure}" if failure else "trained the step"


def _substitutes(bundle: StepBundle, rewards: Sequence[Package]) -> dict[str, Package]:
    """New functions by the names of those that they stand in for."""
    known = sorted(bundle.manifest.functions)
    if rewards and len(bundle.kept) < len(bundle.samples):
        raise UsageError(
            f"the bundle has {len(bundle.kept)} of the {len(bundle.samples)} trajectories of the step, so no other "
            "reward can be trained",
            remedy="launch runs with keep=all",
        )
    found = {}
    for package in rewards:
        name = package.spec.name
        if name not in known and not len(known) == len(rewards) == 1:
            raise UsageError(
                f"'{name}' is no function that scored the step{did_you_mean(name, known)}",
                remedy="name it after the one that it stands in for: @reward(name=...)",
            )
        found[name if name in known else known[0]] = package
    return found


async def _called(bundle: StepBundle, name: str, package: Package, functions: ClusterFunctions) -> Rescoring:
    """The trajectories that the function `name` has scored, scored by `package`."""
    spec = package.spec.model_copy(update={"warm": 0})
    scored = [one for one in bundle.kept if one.outcome(name) is not None]
    limit = max(bundle.run.leases.reward_s, 3.0 * (spec.timeout_s + spec.init_timeout_s))
    items, bills, seconds = await rescore(
        replace(package, spec=spec), scored, name, times=1, provider="local", functions=functions, deadline_s=limit
    )
    return Rescoring(
        run=bundle.manifest.run,
        old=name,
        new=spec.name,
        version=package.version,
        provider="local",
        items=tuple(items),
        available=len(scored),
        calls=tuple(bills.calls),
        tokens=tuple(bills.bills),
        seconds=seconds,
        prices=bundle.prices,
        tolerance=0.0,
        gpu=spec.gpu,
    )


def _paid_again(bundle: StepBundle, answers: Mapping[tuple[str, str], Outcome]) -> list[TrainSample] | str:
    """The batch with the new answers, and the recorded outcomes of other functions."""

    def outcome(kept: KeptTrajectory, function: str) -> Outcome | None:
        return answers.get((function, kept.id)) or recorded_outcome(kept, function)

    return rewarded_batch(bundle.run, bundle.manifest.step, bundle.kept, outcome)


def _tolerance(bundle: StepBundle, device: str) -> tuple[float, str]:
    """The relative difference to expect, 0 for equal bits; and why."""
    config, here = bundle.trainer, this_machine()
    if config.device != device or config.parallel.sharded:
        computed = f"{config.parallel.ranks} rank(s) on {config.device} in {config.parallel.dtype}"
        return TOLERANCE, f"the run's trainer computed with {computed}, this one with 1 on {device} in float32"
    if device != "cpu" and not config.deterministic:
        return TOLERANCE, "a GPU adds up in no fixed order (`deterministic: true` of the run fixes it)"
    if config.stream:
        return TOLERANCE, "a streamed step adds up in the order in which groups ended"
    for name in SAME_BITS:
        if (there := bundle.manifest.machine.get(name, "")) != here[name]:
            return (
                TOLERANCE,
                f"{name} is {here[name] or 'missing'} here, {there or 'missing'} where the bundle was written",
            )
    return 0.0, "the same processor, torch and transformers as where the bundle was written"


async def _trained(bundle: StepBundle, samples: Sequence[TrainSample], device: str) -> dict[str, float]:
    """The metrics of the step, by the trainer's program on the bundle's weights. `TrainerError` as in a run."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if bundle.trainer.lora is not None and importlib.util.find_spec("peft") is None:
        missing.append("peft")
    if missing:
        extra = "lora" if "peft" in missing else "local"
        raise UsageError(
            f"training needs {missing[0]}, which is not installed", remedy=f"pip install 'rollart[{extra}]'"
        )
    root, version = bundle.directory, bundle.manifest.version
    config = root / "replay.json"
    config.write_text(_for_this_machine(bundle.trainer, root, device).model_dump_json(), encoding="utf-8")
    program = Program("trainer", "rollart.train", ["--config", str(config)], str(root / "trainer.log"))
    try:
        trainer = HttpTrainer(await program.start([]))
        try:
            path = version_path(root / bundle.trainer.weights_root, version)
            await trainer.restore(WeightsRef(version, str(path)))
            return dict((await trainer.train(samples, version)).metrics)
        finally:
            await trainer.aclose()
    except PartDied as error:  # its remedy names a log that goes with the unpacked bundle
        raise RunFailed(error.message) from None
    finally:
        await program.stop()


def _for_this_machine(config: TrainerConfig, root: Path, device: str) -> TrainerConfig:
    """The trainer's settings for one rank on a device, with paths below `root`."""
    model, loss = config.model, config.loss
    if model.path is not None:
        model = model.model_copy(update={"path": str(root / model.path)})
    if isinstance(loss.reference, str):
        loss = loss.model_copy(update={"reference": str(root / loss.reference)})
    parallel = config.parallel.model_copy(update={"ranks": 1, "dtype": "float32"})
    return config.model_copy(
        update={
            "model": model,
            "loss": loss,
            "parallel": parallel,
            "device": device,
            "weights_root": str(root / config.weights_root),
        }
    )


def replay_report(found: StepReplay) -> Report:
    """What was repeated, beside what was recorded. Pure."""
    manifest = found.manifest
    tables = [_functions(found), _metrics(found), _rewards(found)]
    for one in found.rescorings:
        own = rescore_report(one).tables
        if len(found.rescorings) > 1:
            own = tuple(replace(t, name=f"{one.old}_{t.name}", title=f"{one.old}: {t.title}") for t in own)
        tables += own
    rule = "bit-equal" if not found.tolerance else f"within {found.tolerance:g} relative"
    notes = [
        f"step {manifest.step} of {manifest.run}, from v{manifest.version}: {manifest.samples} samples",
        f"metrics must be {rule}: {found.why}",
        *manifest.notes,
    ]
    if not manifest.weights:
        notes.append("nothing was trained: the bundle was written without weights")
    if found.fault:
        notes.append(f"nothing was trained: {found.fault}")
    if found.failure:
        notes.append(f"the trainer failed{' as in the run' * (found.failure == manifest.failure)}: {found.failure}")
    difference = found.first_difference
    notes.append(f"first difference: {difference}" if difference else "no difference")
    return Report("replay", manifest.run, tuple(tables), tuple(notes))


@table("functions", "Reward functions")
def _functions(found: StepReplay) -> Iterator[Row]:
    for name, function in sorted(found.manifest.functions.items()):
        items, substitute = found.items.get(name), next((r.new for r in found.rescorings if r.old == name), None)
        equal = None if items is None else sum(paid(one.old.outcome) == paid(one.answers[0]) for one in items)
        differ = None if items is None else sum(reward_differs(one, exact=name in found.alone) for one in items)
        yield {
            "function": name,
            "version": function.version[:12],
            "replayed": as_text(substitute or ("again" if items is not None else None)),
            "rewards": as_count(sum(one.outcome(name) is not None for one in found.kept)),
            "bit_equal": as_count(equal),
            "different": as_count(differ),
            "why_recorded": as_text(None if items is not None else function.why, wrap=True),
        }


@table("metrics", "Metrics of the step", optional=True)
def _metrics(found: StepReplay) -> Iterator[Row]:
    for metric in found.metrics:
        a, b = metric.recorded, metric.replayed
        equal = a is not None and b is not None and _same(a, b)
        yield {
            "metric": metric.name,
            "recorded": as_number(a),
            "replayed": as_number(b),
            "difference": as_number(0.0 if equal else None if a is None or b is None else b - a),
            "agrees": "no" if metric.differs else "bit-equal" if equal else "yes" if _must_agree(metric.name) else "-",
        }


@table("rewards", "Rewards", people=False)
def _rewards(found: StepReplay) -> Iterator[Row]:
    for name, items in found.items.items():
        for item in items:
            yield {
                "function": name,
                "trajectory": item.kept.id,
                "recorded": as_number(item.before),
                "replayed": as_number(item.after),
                "outcome": outcome_text(item.answers[0]),
                "differs": int(reward_differs(item, exact=name in found.alone)),
            }
