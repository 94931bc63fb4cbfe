"""Rules of the data flow to the trainer and back: batches and weights. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from rollart.spec.problem import RuleViolation
from rollart.spec.run import LAG, RunSpec
from rollart.spec.weights import WeightStoreSpec

__all__ = ["flow_problems"]


def flow_problems(run: RunSpec) -> list[RuleViolation]:
    """Every broken rule, in the order of the spec's parts."""
    return [*_sampler(run), *_weights(run), *_columns(run)]


def _columns(run: RunSpec) -> Iterable[RuleViolation]:
    """A column is filled once, from data that is available before the batch is complete."""
    columns, loc = run.training.columns, ("training", "columns")
    if len(set(columns)) < len(columns):
        yield RuleViolation(loc, f"training.columns is {', '.join(columns)} (rule: each at most once)")
    if "ref_logprobs" in columns and not run.training.loss.kl:
        yield RuleViolation(loc, "training.columns has ref_logprobs (rule: with training.loss.kl above 0)")
    if "advantage" not in columns:
        return
    if run.batch.sampler == "token_budget":
        yield RuleViolation(
            loc,
            "training.columns has advantage with batch.sampler token_budget (rule: fifo or deadline; "
            "baselines are over the samples that are trained)",
        )
    for i, domain in enumerate(run.domains):
        if domain.advantage.baseline == "domain":
            yield RuleViolation(
                ("domains", i, "advantage", "baseline"),
                f"domain '{domain.name}' has advantage.baseline 'domain', a mean over the whole batch (rule: group or "
                "none with advantage in training.columns)",
            )


def _weights(run: RunSpec) -> Iterable[RuleViolation]:
    """Engines may differ in version where trajectories of different versions are trained together."""
    weights, loc = run.weights, ("weights", "update")
    if weights.store is not None:
        yield from _store(weights.store)
        if weights.collective is not None:
            yield RuleViolation(
                ("weights", "collective"),
                "weights.collective and weights.store are given (rule: one of them; a broadcast reaches engines that "
                "the trainer reaches)",
            )
    if weights.update != "all":
        if run.schedule in LAG:
            yield RuleViolation(
                loc,
                f"weights.update is {weights.update} under `schedule: {run.schedule}` (rule: all, or a schedule with a "
                "window of groups: paced, rollart, areal, roll_flash)",
            )
        elif run.staleness == 0:
            yield RuleViolation(
                loc,
                f"weights.update is {weights.update} with staleness 0 (rule: all, or staleness of at least 1: no "
                "engine may serve an old version)",
            )
        elif run.staleness == 1 and weights.update == "on_divergence":
            yield RuleViolation(
                loc,
                "weights.update is on_divergence with staleness 1 (rule: staleness of at least 2: with 1 every engine "
                "has to load every version)",
            )
    if weights.update == "on_divergence" and weights.threshold is None:
        yield RuleViolation(loc, "weights.update is on_divergence (rule: with weights.threshold)")
    for key, update in (("longest_s", "delayed"), ("fraction", "staggered"), ("threshold", "on_divergence")):
        if getattr(weights, key) is not None and weights.update != update:
            yield RuleViolation(
                ("weights", key), f"weights.{key} is given with update '{weights.update}' (rule: only with {update})"
            )


def _sampler(run: RunSpec) -> Iterable[RuleViolation]:
    """Each sampler has the settings that it needs, and none of another's."""
    batch, loc = run.batch, ("batch", "sampler")
    needed = {"token_budget": "tokens", "deadline": "deadline_s"}.get(batch.sampler)
    if needed is not None and getattr(batch, needed) is None:
        yield RuleViolation(loc, f"batch.sampler is {batch.sampler} (rule: with batch.{needed})")
    if batch.sampler != "fifo" and run.training.stream:
        yield RuleViolation(loc, f"batch.sampler is {batch.sampler} with training.stream (rule: fifo)")
    if batch.sampler == "deadline":
        if run.schedule in LAG:
            yield RuleViolation(
                loc,
                f"batch.sampler is deadline under `schedule: {run.schedule}` (rule: a schedule with a window of "
                "groups: paced, rollart, areal, roll_flash)",
            )
        if batch.tokens is not None:
            yield RuleViolation(
                ("batch", "tokens"), "batch.tokens is given with sampler 'deadline' (rule: one of them)"
            )
        return
    if batch.sampler == "fifo" and batch.tokens is not None and run.schedule in LAG:
        yield RuleViolation(
            ("batch", "tokens"),
            f"batch.tokens is {batch.tokens} under `schedule: {run.schedule}` (rule: a schedule of whole batches "
            "trains the batch that it admitted; the part beyond a budget would be trained too late, or lost for "
            "ending last). For even steps: batch.sampler: token_budget; for smaller batches: batch.trajectories; or a "
            "schedule with a window of groups",
        )
    for key in ("deadline_s", "least", "age_decay"):
        if getattr(batch, key) is not None:
            yield RuleViolation(
                ("batch", key), f"batch.{key} is given with sampler '{batch.sampler}' (rule: only with deadline)"
            )


def _store(store: WeightStoreSpec) -> Iterable[RuleViolation]:
    loc = ("weights", "store")
    if (store.kind == "s3") != store.url.startswith("s3://"):
        rule = "s3://BUCKET or s3://BUCKET/PREFIX" if store.kind == "s3" else "a directory"
        yield RuleViolation((*loc, "url"), f"weights.store.url is '{store.url}' with kind {store.kind} (rule: {rule})")
    elif store.kind == "s3" and not store.url.removeprefix("s3://").partition("/")[0]:
        yield RuleViolation(
            (*loc, "url"), f"weights.store.url is '{store.url}' (rule: s3://BUCKET or s3://BUCKET/PREFIX)"
        )
    if store.local is not None and not PurePosixPath(store.local).is_absolute():
        yield RuleViolation((*loc, "local"), f"weights.store.local is '{store.local}' (rule: an absolute path)")
