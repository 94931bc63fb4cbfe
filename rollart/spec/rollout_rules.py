"""Rules between a run's `rollout` section and the rest of its spec. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollart.spec.problem import RuleViolation
from rollart.spec.run import RunSpec

__all__ = ["rollout_problems"]


def rollout_problems(run: RunSpec) -> list[RuleViolation]:
    """Every broken rule of `rollout`."""
    return [*_harnesses(run), *_beyond(run), *_filter(run), *_concurrency(run), *_lending(run), *_fairness(run)]


def _harnesses(run: RunSpec) -> Iterable[RuleViolation]:
    for i, domain in enumerate(run.domains):
        if not isinstance(domain.environment, str) and run.rollout.prefetch != 0:
            yield RuleViolation(
                ("domains", i, "environment"),
                f"domain '{domain.name}' is a harness with rollout.prefetch {run.rollout.prefetch} (rule: 0, since it "
                "has no reset)",
            )


def _beyond(run: RunSpec) -> Iterable[RuleViolation]:
    tail, redundancy = run.rollout.tail_batching, run.rollout.redundancy
    largest = max(d.group_size for d in run.domains)
    if redundancy.size > 1 and int(largest * redundancy.size + 1e-9) == largest:
        yield RuleViolation(
            ("rollout", "redundancy", "size"),
            f"rollout.redundancy.size is {redundancy.size:g} (rule: at least {1 + 1 / largest:g} with groups of "
            f"{largest}, or 1: members are whole)",
        )
    if tail is None:
        return
    loc = ("rollout", "tail_batching")
    if run.schedule not in ("sync", "sync_plus"):
        yield RuleViolation(
            loc,
            f"rollout.tail_batching is given under `schedule: {run.schedule}` (rule: under sync or sync_plus, as its "
            "rounds are steps)",
        )
    if max(redundancy.groups, redundancy.size) > 1:
        yield RuleViolation(
            loc,
            "rollout.tail_batching is given beside rollout.redundancy (rule: one of them; tail batching starts more "
            "than is needed by itself)",
        )
    if run.batch.tokens is not None:
        yield RuleViolation(
            loc,
            f"rollout.tail_batching is given with batch.tokens {run.batch.tokens} (rule: a round trains every prompt "
            "that ends it, so its batch has no token budget)",
        )


def _filter(run: RunSpec) -> Iterable[RuleViolation]:
    """Filtered groups have no advantage, and their replacements are drawn one by one."""
    filtering, loc = run.rollout.filter, ("rollout", "filter")
    if not filtering.zero_variance:
        if filtering.max_additional_running_prompts:
            yield RuleViolation(
                (*loc, "max_additional_running_prompts"),
                f"rollout.filter.max_additional_running_prompts is {filtering.max_additional_running_prompts} "
                "(rule: with zero_variance, whose losses they replace; without it, rollout.redundancy.groups)",
            )
        return
    for domain in run.domains:
        if domain.advantage.baseline != "group" or domain.group_size == 1:
            yield RuleViolation(
                (*loc, "zero_variance"),
                f"rollout.filter.zero_variance is given, but domain '{domain.name}' has advantage.baseline "
                f"'{domain.advantage.baseline}' and group_size {domain.group_size} (rule: group, and at least 2: other "
                "groups teach something though their rewards are alike)",
            )
            return
    if run.rollout.tail_batching is not None and filtering.max_additional_running_prompts:
        yield RuleViolation(
            (*loc, "max_additional_running_prompts"),
            f"rollout.filter.max_additional_running_prompts is {filtering.max_additional_running_prompts} beside "
            "rollout.tail_batching (rule: 0: its rounds say what is started)",
        )


def _concurrency(run: RunSpec) -> Iterable[RuleViolation]:
    """The search has room to move."""
    spec, loc = run.rollout.concurrency, ("rollout", "concurrency")
    if not spec.least <= spec.start <= spec.most:
        yield RuleViolation(
            (*loc, "start"),
            f"rollout.concurrency.start is {spec.start} (rule: least {spec.least} <= start <= most {spec.most})",
        )
    if not spec.low < spec.high:
        yield RuleViolation(
            (*loc, "low"), f"rollout.concurrency.low is {spec.low:g} (rule: below `high`, which is {spec.high:g})"
        )
    if run.rollout.dispatch != "fifo" and (run.schedule == "sync" or spec.mode == "off"):
        setting = "schedule: sync" if run.schedule == "sync" else "rollout.concurrency.mode: off"
        yield RuleViolation(
            ("rollout", "dispatch"),
            f"rollout.dispatch is {run.rollout.dispatch} under `{setting}` (rule: it orders trajectories that wait for "
            "room in an engine, and with that setting none waits)",
        )
    if spec.settle_s < spec.interval_s:
        yield RuleViolation(
            (*loc, "settle_s"),
            f"rollout.concurrency.settle_s is {spec.settle_s:g} (rule: at least interval_s, {spec.interval_s:g}: a "
            "fall takes longer to show than a rise)",
        )


def _lending(run: RunSpec) -> Iterable[RuleViolation]:
    """Lent devices train on finished trajectories while the rollout ends."""
    if run.rollout.lending is None:
        return
    loc = ("rollout", "lending")
    if run.schedule != "sync_plus" or not run.training.stream:
        yield RuleViolation(
            loc,
            f"rollout.lending is given under `schedule: {run.schedule}` with training.stream "
            f"{str(run.training.stream).lower()} (rule: sync_plus, and true: finished trajectories are trained while "
            "the rest is rolled out)",
        )
    if run.rollout.parallelism is not None:
        yield RuleViolation(
            loc, "rollout.lending is given beside rollout.parallelism (rule: one of them moves engines)"
        )


def _fairness(run: RunSpec) -> Iterable[RuleViolation]:
    """Shares of a run are counted in groups of one size, and each batch takes the groups that are due."""
    for i, domain in enumerate(run.domains):
        if domain.floor > domain.cap:
            yield RuleViolation(
                ("domains", i, "floor"),
                f"domain '{domain.name}' has floor {domain.floor:g} (rule: at most its cap, {domain.cap:g})",
            )
            return
    floors, caps = sum(d.floor for d in run.domains), sum(d.cap for d in run.domains)
    if floors > 1 + 1e-9 or caps < 1 - 1e-9:
        yield RuleViolation(
            ("domains",),
            f"the domains' floors add up to {floors:g}, their caps to {caps:g} (rule: 1 lies between them)",
        )
        return
    if not run.fair:
        return
    sizes = sorted({d.group_size for d in run.domains})
    tail, own = run.rollout.tail_batching, any(d.trajectories is not None for d in run.domains)
    for broken, loc, rule in (
        (len(sizes) > 1, ("domains",), f"one group_size in all domains, where these have {sizes}"),
        (own, ("domains",), "no `trajectories` of domains, but weights"),
        (run.batch.tokens is not None, ("batch", "tokens"), "no token budget"),
        (run.batch.sampler != "fifo", ("batch", "sampler"), "sampler fifo"),
        (tail is not None, ("rollout", "tail_batching"), "no tail batching, whose rounds have quotas"),
    ):
        if broken:
            yield RuleViolation(loc, f"shares of domains (rollout.fairness, floor or cap) are asked for (rule: {rule})")
