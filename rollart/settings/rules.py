"""Rules between the fields of a spec, each violation with its key path. Pure.

A rule yields the text of a violation, which begins with the key that breaks the rule (`batch.tokens is …`), or a
`RuleViolation` where the text begins otherwise. Rules are in the order in which their violations are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

from placement.hardware import canonical, catalogue
from placement.publish import STORE
from rollart.errors import SpecError, did_you_mean, some_of
from rollart.settings.cluster import ClusterSpec, DeviceSpec, PoolSpec
from rollart.settings.document import KeyPath
from rollart.settings.prices import PriceEntry, PriceList
from rollart.settings.rollout import RolloutSpec
from rollart.settings.run import LAG, DomainSpec, FunctionEntry, RunSpec, WeightStoreSpec
from rollart.settings.training import TeacherSpec, adapter_problem, critic_problem
from rollart.shares import bounded_shares

SUPERVISED_METRICS = ("entropy", "grad_norm", "held_out_success")
"""Metrics of `stop_when` that a run on given conversations has."""

ROUNDING = 1e-9
"""Tolerance for rounding in sums and products of fractions."""


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A broken rule and the path of the value that breaks it. `key`: the key is wrong, not its value."""

    loc: KeyPath
    message: str
    remedy: str = ""
    key: bool = False


Violations: TypeAlias = Iterator[str | RuleViolation]


def run_problems(run: RunSpec) -> list[RuleViolation]:
    """Every broken rule of a run spec, in file order."""
    if not run.domains and run.training.data is None:  # the rules below are about tasks
        return located(iter(["domains has no entry (rule: at least one, unless training.algorithm is sft)"]))
    problems = located(
        _model(run),
        _deterministic(run),
        _supervised(run),
        _rollout(run),
        _chat(run),
        _filter(run),
        _concurrency(run),
        _lending(run),
        _fairness(run),
        _unique("domains", run.domains),
        _unique("functions", run.functions),
        _functions(run),
        _rewards(run),
        _turns(run),
        _profiles(run),
        _quota_rules(run),
        _warm_start(run),
        _checkpoints(run),
        _stop_when(run),
        _temperatures(run),
        _affinity(run),
        _objective(run),
        _stream(run),
        _critic(run),
        _adapters(run),
        _reference(run),
        _sampler(run),
        _weights(run),
        _columns(run),
    )
    if not problems:
        try:
            quotas(run)
        except SpecError as error:
            problems.append(_at("batch.trajectories", error.message))
    return problems


def cluster_problems(cluster: ClusterSpec) -> list[RuleViolation]:
    """Every broken rule of a cluster spec."""
    return located(
        _unique("devices", cluster.devices),
        _unique("pools", cluster.pools),
        _device_types(cluster),
        _links(cluster),
        _engines(cluster),
        _wanted(cluster),
        _environments(cluster),
    )


def price_problems(prices: PriceList) -> list[RuleViolation]:
    """Every broken rule of a price list that bills are computed from."""
    missing = [
        missing_price(("prices", prices.prices.index(entry), "unit"), entry, needed)
        for entry, needed in prices.incomplete()
    ]
    return [*repeated_prices(prices), *missing]


def missing_price(loc: KeyPath, entry: PriceEntry, needed: str) -> RuleViolation:
    """The violation of a price that needs another one of its name (`PriceList.incomplete`)."""
    return RuleViolation(
        loc,
        f"'{entry.name}' has a price per {entry.unit} and none per {needed}, which would count as $0 (rule: both)",
        remedy=f"add its price per {needed}, 0 if there is no charge",
    )


def repeated_prices(prices: PriceList) -> list[RuleViolation]:
    """A name has one price per unit and kind."""
    counts = Counter((p.name, p.unit, p.kind) for p in prices.prices)
    return [
        _at(f"prices.{i}.name", f"price of '{p.name}' per {p.unit} is given twice (rule: once)")
        for i, p in enumerate(prices.prices)
        if counts[p.name, p.unit, p.kind] > 1
    ]


def quotas(run: RunSpec) -> dict[str, int]:
    """Trajectories of each domain per step, whole groups, summing to `batch.trajectories`.

    Explicit quotas are taken as they are. Otherwise each domain gets its share by weight, rounded down to whole
    groups and at least one; what remains goes group by group to the domain furthest below its share (ties: the
    first named). SpecError when group sizes cannot fill the batch exactly.
    """
    if run.training.data is not None:  # nothing is rolled out: relative weights for a plan of evaluations
        return {d.name: d.group_size for d in run.domains}
    explicit = {d.name: d.trajectories for d in run.domains if d.trajectories is not None}
    if len(explicit) == len(run.domains):
        return explicit
    batch = run.batch.trajectories
    try:
        shares = bounded_shares(run.shares)
    except ValueError as error:
        raise SpecError(f"domains: {error}") from None
    share = {name: batch * part for name, part in shares.items()}
    filled = {d.name: max(1, int(share[d.name] // d.group_size)) * d.group_size for d in run.domains}
    while (left := batch - sum(filled.values())) > 0:
        fitting = [d for d in run.domains if d.group_size <= left]
        if not fitting:
            break
        most = max(fitting, key=lambda d: share[d.name] - filled[d.name])
        filled[most.name] += most.group_size
    total = sum(filled.values())
    if total != batch:
        sizes = some_of(f"{d.name} {d.group_size}" for d in run.domains)
        raise SpecError(
            f"batch.trajectories is {batch} (rule: filled by whole groups of {sizes}; these shares make {total})"
        )
    return filled


def known_device(name: str) -> bool:
    """True if the catalogue has the type, under this or another name."""
    try:
        return bool(canonical(name))
    except ValueError:
        return False


def located(*rules: Violations) -> list[RuleViolation]:
    """The violations of several rules, in their order. A text alone begins with its key."""
    found = (one for rule in rules for one in rule)
    return [one if isinstance(one, RuleViolation) else _at(one.partition(" ")[0], one) for one in found]


def _at(path: str, text: str) -> RuleViolation:
    return RuleViolation(tuple(int(part) if part.isdecimal() else part for part in path.split(".")), text)


def _unique(key: str, entries: Sequence[DeviceSpec | PoolSpec | DomainSpec | FunctionEntry]) -> Violations:
    counts = Counter(entry.name for entry in entries)
    for i, entry in enumerate(entries):
        if (n := counts[entry.name]) > 1:
            yield f"{key}.{i}.name is '{entry.name}' (rule: names are unique; it occurs {n} times)"


def _model(run: RunSpec) -> Violations:
    given = [run.model.path, run.model.init]
    if None not in given or (given == [None, None] and run.model.config is None):
        rule = "exactly one; a plan alone is content with 'config'"
        yield f"model has both or neither of 'path' and 'init' (rule: {rule})"
    lag = LAG.get(run.schedule, run.staleness)
    if run.staleness != lag:
        yield f"staleness is {run.staleness} (rule: {lag} under `schedule: {run.schedule}`: stages follow each other)"


def _deterministic(run: RunSpec) -> Violations:
    """Nothing that is trained depends on what ends first."""
    rollout = run.rollout
    for broken, setting, rule in (
        (
            run.schedule not in LAG and run.training.data is None,
            f"schedule {run.schedule}",
            "sync, sync_plus or one_off: one version per batch",
        ),
        (max(rollout.redundancy.groups, rollout.redundancy.size) > 1, "rollout.redundancy", "none: it takes the first"),
        (rollout.tail_batching is not None, "rollout.tail_batching", "none: it takes the first"),
        (rollout.filter.zero_variance, "rollout.filter.zero_variance", "none: it draws replacements as groups end"),
        (run.fair, "shares of the run (rollout.fairness, floor or cap)", "quotas: shares follow what ends first"),
        (run.batch.sampler != "fifo" or run.batch.tokens is not None, "batch.sampler or batch.tokens", "whole batches"),
    ):
        if run.deterministic and broken:
            yield f"deterministic is given with {setting} (rule: {rule})"


def _supervised(run: RunSpec) -> Violations:
    """With `training.data` nothing is rolled out or scored; domains are for evaluations alone."""
    if run.training.data is None:
        return
    nothing = "with training.data, where nothing is rolled out"
    for key, given in (
        ("rollout", run.rollout != RolloutSpec()),
        ("schedule", run.schedule not in ("async", "rollart")),
        ("weights.update", run.weights.update != "all"),
        ("batch.tokens", run.batch.tokens is not None),
        ("batch.sampler", run.batch.sampler != "fifo"),
        ("functions", bool(run.functions)),
        ("warm_start", run.warm_start is not None),
        ("domains", bool(run.domains) and not run.evaluation.episodes),
    ):
        if given:
            less = " and evaluation.episodes is 0" if key == "domains" else ""
            yield f"{key} is given {nothing}{less} (rule: leave it out)"
    if run.evaluation.episodes and not run.domains:
        yield f"evaluation.episodes is {run.evaluation.episodes} without domains (rule: those whose episodes it plays)"
    if (run.checkpoints.best_by or "").startswith("reward"):
        yield f"checkpoints.best_by is {run.checkpoints.best_by} {nothing} (rule: success, of held-out episodes)"
    for i, condition in enumerate(run.stop_when):
        if condition.metric.partition(".")[0] not in SUPERVISED_METRICS:
            rule = f"rule: {', '.join(SUPERVISED_METRICS)}"
            yield f"stop_when.{i}.metric is {condition.metric} {nothing} ({rule})"


def _rollout(run: RunSpec) -> Violations:
    """Redundancy and tail batching, beside the rest of the run."""
    rollout = run.rollout
    for i, domain in enumerate(run.domains):
        if not isinstance(domain.environment, str) and rollout.prefetch != 0:
            text = f"is a harness with rollout.prefetch {rollout.prefetch} (rule: 0, since it has no reset)"
            yield _at(f"domains.{i}.environment", f"domain '{domain.name}' {text}")
    largest, size = max((d.group_size for d in run.domains), default=1), rollout.redundancy.size
    if size > 1 and int(largest * size + ROUNDING) == largest:
        yield (
            f"rollout.redundancy.size is {size:g} (rule: at least {1 + 1 / largest:g} with groups of {largest}, or 1: "
            "members are whole)"
        )
    if rollout.tail_batching is None:
        return
    if run.schedule not in ("sync", "sync_plus"):
        yield (
            f"rollout.tail_batching is given under `schedule: {run.schedule}` (rule: under sync or sync_plus, as its "
            "rounds are steps)"
        )
    if max(rollout.redundancy.groups, size) > 1:
        yield (
            "rollout.tail_batching is given beside rollout.redundancy (rule: one of them; tail batching starts more "
            "than is needed by itself)"
        )
    if run.batch.tokens is not None:
        yield (
            f"rollout.tail_batching is given with batch.tokens {run.batch.tokens} (rule: a round trains every prompt "
            "that ends it, so its batch has no token budget)"
        )


def _chat(run: RunSpec) -> Violations:
    """Agent programs send messages themselves."""
    for i, domain in enumerate(run.domains):
        if domain.chat is not None and not isinstance(domain.environment, str):
            text = "is given for a harness (rule: an environment's; a harness has the chat template by the proxy)"
            yield _at(f"domains.{i}.chat", f"chat of domain '{domain.name}' {text}")


def _filter(run: RunSpec) -> Violations:
    """Filtered groups have no advantage, and their replacements are drawn one by one."""
    spec = run.rollout.filter
    additional = f"rollout.filter.max_additional_running_prompts is {spec.max_additional_running_prompts}"
    if not spec.zero_variance:
        if spec.max_additional_running_prompts:
            yield (
                f"{additional} (rule: with zero_variance, whose losses they replace; without it, "
                "rollout.redundancy.groups)"
            )
        return
    for domain in run.domains:
        if domain.advantage.baseline not in ("group", "leave_one_out") or domain.group_size == 1:
            yield (
                f"rollout.filter.zero_variance is given, but domain '{domain.name}' has advantage.baseline "
                f"'{domain.advantage.baseline}' and group_size {domain.group_size} (rule: group, and at least 2: other "
                "groups teach something though their rewards are alike)"
            )
            return
    if run.rollout.tail_batching is not None and spec.max_additional_running_prompts:
        yield f"{additional} beside rollout.tail_batching (rule: 0: its rounds say what is started)"


def _concurrency(run: RunSpec) -> Violations:
    """The search has room to move."""
    spec = run.rollout.concurrency
    if not spec.least <= spec.start <= spec.most:
        yield f"rollout.concurrency.start is {spec.start} (rule: least {spec.least} <= start <= most {spec.most})"
    if not spec.low < spec.high:
        yield f"rollout.concurrency.low is {spec.low:g} (rule: below `high`, which is {spec.high:g})"
    if run.rollout.dispatch != "fifo" and (run.schedule == "sync" or spec.mode == "off"):
        setting = "schedule: sync" if run.schedule == "sync" else "rollout.concurrency.mode: off"
        yield (
            f"rollout.dispatch is {run.rollout.dispatch} under `{setting}` (rule: it orders trajectories that wait for "
            "room in an engine, and with that setting none waits)"
        )
    if spec.settle_s < spec.interval_s:
        yield (
            f"rollout.concurrency.settle_s is {spec.settle_s:g} (rule: at least interval_s, {spec.interval_s:g}: a "
            "fall takes longer to show than a rise)"
        )


def _lending(run: RunSpec) -> Violations:
    """Lent devices train on finished trajectories while the rollout ends."""
    if run.rollout.lending is None:
        return
    if run.schedule != "sync_plus" or not run.training.stream:
        yield (
            f"rollout.lending is given under `schedule: {run.schedule}` with training.stream "
            f"{str(run.training.stream).lower()} (rule: sync_plus, and true: finished trajectories are trained while "
            "the rest is rolled out)"
        )
    if run.rollout.parallelism is not None:
        yield "rollout.lending is given beside rollout.parallelism (rule: one of them moves engines)"


def _fairness(run: RunSpec) -> Violations:
    """Shares of a run are counted in groups of one size, and each batch takes the groups that are due."""
    for i, domain in enumerate(run.domains):
        if domain.floor > domain.cap:
            text = f"domain '{domain.name}' has floor {domain.floor:g} (rule: at most its cap, {domain.cap:g})"
            yield _at(f"domains.{i}.floor", text)
            return
    if not run.domains:
        return
    floors, caps = sum(d.floor for d in run.domains), sum(d.cap for d in run.domains)
    if floors > 1 + ROUNDING or caps < 1 - ROUNDING:
        text = f"the domains' floors add up to {floors:g}, their caps to {caps:g} (rule: 1 lies between them)"
        yield _at("domains", text)
        return
    if not run.fair:
        return
    sizes = sorted({d.group_size for d in run.domains})
    tail, own = run.rollout.tail_batching, any(d.trajectories is not None for d in run.domains)
    for broken, path, rule in (
        (len(sizes) > 1, "domains", f"one group_size in all domains, where these have {sizes}"),
        (own, "domains", "no `trajectories` of domains, but weights"),
        (run.batch.tokens is not None, "batch.tokens", "no token budget"),
        (run.batch.sampler != "fifo", "batch.sampler", "sampler fifo"),
        (tail is not None, "rollout.tail_batching", "no tail batching, whose rounds have quotas"),
    ):
        if broken:
            text = f"shares of domains (rollout.fairness, floor or cap) are asked for (rule: {rule})"
            yield _at(path, text)


DEPLOYED_KEYS = frozenset(
    {"batch_bytes", "batch_items", "batch_wait_ms", "cache", "concurrency", "hedge", "init_timeout_s", "keep_alive_s"}
    | {"preload", "queue", "warm"}
)
"""Settings that a run may give to a deployed function: those that are no part of its version."""


def _functions(run: RunSpec) -> Violations:
    for i, entry in enumerate(run.functions):
        if "." in entry.name:
            yield (f"functions.{i}.name is '{entry.name}' (rule: letters, digits, '_', '-': providers take no others)")
        yield from _deployed(entry, i)
        if entry.warm is not None and entry.concurrency is not None and entry.warm > entry.concurrency:
            text = f"function '{entry.name}' has warm {entry.warm} (rule: at most its concurrency, {entry.concurrency})"
            yield _at(f"functions.{i}.warm", text)
        several = entry.artefact if isinstance(entry.artefact, list) else []
        if len(several) > 1 and any(":" in path for path in several):
            text = f"has {len(several)} artefacts with a producer (rule: paths, or one producer)"
            yield _at(f"functions.{i}.artefact", f"function '{entry.name}' {text}")


def _deployed(entry: FunctionEntry, i: int) -> Violations:
    """A function has a source with a handler, or is a deployed one under its name."""
    path, function = f"functions.{i}", f"function '{entry.name}'"
    if entry.function is None:
        for key in ("source", "handler"):
            if not getattr(entry, key):
                yield _at(f"{path}.{key}", f"{function} has no {key} (rule: source and handler, or function)")
        return
    if entry.name != entry.function.partition("@")[0]:
        text = f"{function} names the deployed {entry.function} (rule: the same name, which is part of the version)"
        yield _at(f"{path}.name", text)
    given = entry.model_dump(exclude_defaults=True, exclude={"name", "function"})
    for key in sorted(given.keys() - DEPLOYED_KEYS):
        rule = f"the deployed version has its own; only {', '.join(sorted(DEPLOYED_KEYS))} may be given"
        text = f"{function} names the deployed {entry.function}, and has {key} (rule: {rule})"
        yield _at(f"{path}.{key}", text)


def _rewards(run: RunSpec) -> Violations:
    known = [f.name for f in run.functions]
    for i, domain in enumerate(run.domains):
        for j, use in enumerate(domain.rewards):
            if use.function not in known:
                rule = f"an entry of `functions`{did_you_mean(use.function, known)}"
                text = f"domain '{domain.name}' uses function '{use.function}' (rule: {rule})"
                yield _at(f"domains.{i}.rewards.{j}.function", text)
        if not domain.rewards and domain.env_reward_weight == 0:
            text = "pays nothing (rule: a reward function, or env_reward_weight other than 0)"
            yield _at(f"domains.{i}", f"domain '{domain.name}' {text}")


def _turns(run: RunSpec) -> Violations:
    for i, domain in enumerate(run.domains):
        has = f"domain '{domain.name}' has"
        if domain.max_tokens >= run.model.context:
            text = f"{has} max_tokens {domain.max_tokens} (rule: below model.context, {run.model.context})"
            yield _at(f"domains.{i}.max_tokens", text)
        if run.training.loss.kind == "dpo" and domain.group_size == 1:
            rule = "at least 2 for training.loss.kind dpo, whose pairs are of a group"
            yield _at(f"domains.{i}.group_size", f"{has} group_size 1 (rule: {rule})")
            continue
        baseline = domain.advantage.baseline
        if baseline in ("group", "leave_one_out") and domain.group_size == 1:
            rule = f"at least 2 for `advantage.baseline: {baseline}`, whose mean is the sample itself otherwise"
            yield _at(f"domains.{i}.group_size", f"{has} group_size 1 (rule: {rule})")


def _profiles(run: RunSpec) -> Violations:
    """A profile is within the bounds of its domain and of the model."""
    for i, domain in enumerate(run.domains):
        if (profile := domain.profile) is None:
            continue
        has, at = f"domain '{domain.name}' has", f"domains.{i}.profile"
        first = profile.first_tokens or profile.new_tokens
        for field in ("turns", "new_tokens", "output_tokens", "first_tokens"):
            spread = getattr(profile, field)
            if spread is not None and None not in (spread.p50, spread.p90) and spread.p90 < spread.p50:
                yield _at(
                    f"{at}.{field}.p90", f"{has} {field} p90 {spread.p90:g} (rule: at least its p50, {spread.p50:g})"
                )
        if first.mean == 0:
            field = "new_tokens" if profile.first_tokens is None else "first_tokens"
            yield _at(f"{at}.{field}", f"{has} {field} 0 (rule: a first prompt above 0 tokens)")
        for field, value, bound, limit in (
            ("turns", profile.turns, "max_turns", domain.max_turns),
            ("output_tokens", profile.output_tokens, "max_tokens", domain.max_tokens),
        ):
            if value.mean > limit:
                yield _at(f"{at}.{field}", f"{has} {field} {value.mean:g} (rule: at most its {bound}, {limit})")
        turns, each = profile.turns.mean, profile.new_tokens.mean
        total = first.mean + (turns - 1) * each + turns * profile.output_tokens.mean
        if total > run.model.context:
            rule = f"at most model.context, {run.model.context}"
            yield _at(at, f"{has} trajectories of {total:,.0f} tokens by its profile (rule: {rule})")


def _quota_rules(run: RunSpec) -> Violations:
    given: list[tuple[int, DomainSpec, int]] = [
        (i, d, d.trajectories) for i, d in enumerate(run.domains) if d.trajectories is not None
    ]
    for i, domain, quota in given:
        if quota % domain.group_size:
            text = f"has trajectories {quota} (rule: a multiple of its group_size {domain.group_size})"
            yield _at(f"domains.{i}.trajectories", f"domain '{domain.name}' {text}")
    if given and len(given) != len(run.domains):
        text = f"{len(given)} of {len(run.domains)} domains have 'trajectories' (rule: all or none)"
        yield _at("domains", text)
    elif given and (total := sum(quota for _, _, quota in given)) != run.batch.trajectories:
        yield (f"batch.trajectories is {run.batch.trajectories} (rule: the sum of the domains' trajectories, {total})")


def _warm_start(run: RunSpec) -> Violations:
    known = [d.name for d in run.domains]
    for i, name in enumerate(run.warm_start.domains if run.warm_start else ()):
        if name not in known:
            text = f"warm_start names domain '{name}' (rule: an entry of `domains`{did_you_mean(name, known)})"
            yield _at(f"warm_start.domains.{i}", text)


def _checkpoints(run: RunSpec) -> Violations:
    """The best version is found by a domain that exists, and by episodes that are evaluated."""
    kind, _, domain = (run.checkpoints.best_by or "").partition(".")
    known = [d.name for d in run.domains]
    if domain and domain not in known:
        text = f"{run.checkpoints.best_by}' (rule: of an entry of `domains`{did_you_mean(domain, known)})"
        yield f"checkpoints.best_by is '{text}"
    if kind == "success" and not (run.evaluation.episodes and (run.evaluation.at or run.evaluation.every)):
        yield "checkpoints.best_by is by success (rule: with evaluation.episodes above 0; or by `reward`)"


def _stop_when(run: RunSpec) -> Violations:
    """A condition is on a metric that the run has."""
    known = [d.name for d in run.domains]
    for i, condition in enumerate(run.stop_when):
        kind, _, domain = condition.metric.partition(".")
        key = f"stop_when.{i}.metric"
        if domain and domain not in known:
            text = f"{key} is '{condition.metric}' (rule: of an entry of `domains`{did_you_mean(domain, known)})"
            yield _at(key, text)
        if kind == "held_out_success" and not (run.evaluation.episodes and run.evaluation.every):
            yield _at(key, f"{key} is {kind} (rule: with evaluation.episodes and evaluation.every)")
        if kind == "reference_kl" and not run.training.loss.kl:
            yield _at(key, f"{key} is {kind} (rule: with training.loss.kl above 0)")
        if kind == "zero_variance" and all(d.group_size == 1 for d in run.domains):
            yield _at(key, f"{key} is {kind} (rule: with a domain whose group_size is above 1)")


def _temperatures(run: RunSpec) -> Violations:
    """All domains share a temperature: the trainer recomputes log-probabilities at one sampling temperature."""
    for i, domain in enumerate(run.domains):
        first = run.domains[0]
        if domain.temperature != first.temperature:
            rule = f"that of every other domain, {first.temperature} in '{first.name}'"
            text = f"domain '{domain.name}' has temperature {domain.temperature} (rule: {rule})"
            yield _at(f"domains.{i}.temperature", text)


def _affinity(run: RunSpec) -> Violations:
    tags = [d.tag or d.name for d in run.domains]
    for key in run.hw_affinity:
        if key not in (*tags, "default"):
            text = f"hw_affinity names '{key}' (rule: the tag of a domain, or default{did_you_mean(key, tags)})"
            yield RuleViolation(("hw_affinity", key), text)


def _objective(run: RunSpec) -> Violations:
    objective, rate = run.placement.objective, run.placement.rate
    if objective == "min_cost" and rate is None:
        yield "placement.objective is min_cost (rule: with placement.rate, trajectories/s)"
    if objective != "min_cost" and rate is not None:
        yield (
            f"placement.rate is {rate:g} (rule: only with `objective: min_cost`, which is to reach it; this one is "
            f"{objective})"
        )


def _stream(run: RunSpec) -> Violations:
    """A streamed step makes one update of one pass, with advantages that do not wait for the whole batch."""
    if not run.training.stream:
        return
    for name, count in (("epochs", run.training.epochs), ("minibatches", run.training.minibatches)):
        if count > 1:
            yield f"training.{name} is {count} (rule: 1 with training.stream)"
    yield from _batch_baselines(run, "training.stream")
    if run.training.loss.kind == "dpo":
        yield "training.loss.kind is dpo with training.stream (rule: false, since pairs are scored before the step)"
    yield from _whitened(run)


def _batch_baselines(run: RunSpec, setting: str) -> Violations:
    """Advantages that need the mean of the whole batch, which `setting` does not wait for."""
    for i, domain in enumerate(run.domains):
        if why := {"domain": "a mean over the whole batch", "critic": "with values of the step"}.get(
            domain.advantage.baseline
        ):
            text = f"has advantage.baseline '{domain.advantage.baseline}', {why} (rule: group or none with {setting})"
            yield _at(f"domains.{i}.advantage.baseline", f"domain '{domain.name}' {text}")


def _whitened(run: RunSpec) -> Violations:
    for i, domain in enumerate(run.domains):
        if domain.advantage.normalize == "whiten":
            rule = "group, batch or none with training.stream"
            text = f"has advantage.normalize 'whiten', with the mean of the whole batch (rule: {rule})"
            yield _at(f"domains.{i}.advantage.normalize", f"domain '{domain.name}' {text}")


def _critic(run: RunSpec) -> Violations:
    if (problem := critic_problem(run.training, run.domains)) is not None:
        yield RuleViolation(("training", "critic"), problem)


def _adapters(run: RunSpec) -> Violations:
    if (problem := adapter_problem(run.training, {d.name: d for d in run.domains})) is not None:
        given = next(i for i, domain in enumerate(run.domains) if domain.adapter is not None)
        yield _at(f"domains.{given}.adapter", problem)


def _reference(run: RunSpec) -> Violations:
    """A new reference is on disk before the step that refers to it. An endpoint's log-probabilities are of temperature
    1."""
    for i, domain in enumerate(run.domains):
        if isinstance(run.training.loss.reference, TeacherSpec) and domain.temperature != 1.0:
            text = f"domain '{domain.name}' has temperature {domain.temperature:g} with a training.loss.reference"
            yield _at(f"domains.{i}.temperature", f"{text} behind a URL (rule: 1, at which its server scores tokens)")
    if run.training.loss.reference_reset and run.weights.overlap:
        yield (
            "training.loss.reference_reset is given with weights.overlap (rule: without it, since a version is written "
            "during the step that would refer to it)"
        )


def _sampler(run: RunSpec) -> Violations:
    """Each sampler has the settings that it needs, and none of another's."""
    batch, schedule = run.batch, run.schedule
    needed = {"token_budget": "tokens", "deadline": "deadline_s"}.get(batch.sampler)
    if needed is not None and getattr(batch, needed) is None:
        yield f"batch.sampler is {batch.sampler} (rule: with batch.{needed})"
    if batch.sampler != "fifo" and run.training.stream:
        yield f"batch.sampler is {batch.sampler} with training.stream (rule: fifo)"
    if batch.sampler == "deadline":
        if schedule in LAG:
            yield (
                f"batch.sampler is deadline under `schedule: {schedule}` (rule: a schedule with a window of groups: "
                "paced, rollart, areal, roll_flash)"
            )
        if batch.tokens is not None:
            yield "batch.tokens is given with sampler 'deadline' (rule: one of them)"
        return
    if batch.sampler == "fifo" and batch.tokens is not None and schedule in LAG:
        yield (
            f"batch.tokens is {batch.tokens} under `schedule: {schedule}` (rule: a schedule of whole batches trains "
            "the batch that it admitted; the part beyond a budget would be trained too late, or lost for ending last). "
            "For even steps: batch.sampler: token_budget; for smaller batches: batch.trajectories; or a schedule with "
            "a window of groups"
        )
    for key in ("deadline_s", "least", "age_decay"):
        if getattr(batch, key) is not None:
            yield f"batch.{key} is given with sampler '{batch.sampler}' (rule: only with deadline)"


def _weights(run: RunSpec) -> Violations:
    """Engines may differ in version where trajectories of different versions are trained together."""
    weights, update = run.weights, run.weights.update
    if weights.store is not None:
        yield from _store(weights.store)
        if weights.collective is not None:
            yield (
                "weights.collective and weights.store are given (rule: one of them; a broadcast reaches engines that "
                "the trainer reaches)"
            )
    if update != "all" and run.schedule in LAG:
        yield (
            f"weights.update is {update} under `schedule: {run.schedule}` (rule: all, or a schedule with a window of "
            "groups: paced, rollart, areal, roll_flash)"
        )
    elif update != "all" and run.staleness == 0:
        yield (
            f"weights.update is {update} with staleness 0 (rule: all, or staleness of at least 1: no engine may serve "
            "an old version)"
        )
    elif update == "on_divergence" and run.staleness == 1:
        yield (
            "weights.update is on_divergence with staleness 1 (rule: staleness of at least 2: with 1 every engine has "
            "to load every version)"
        )
    if update == "on_divergence" and weights.threshold is None:
        yield "weights.update is on_divergence (rule: with weights.threshold)"
    for key, only in (("longest_s", "delayed"), ("fraction", "staggered"), ("threshold", "on_divergence")):
        if getattr(weights, key) is not None and update != only:
            yield f"weights.{key} is given with update '{update}' (rule: only with {only})"


def _store(store: WeightStoreSpec) -> Violations:
    if (store.kind == "s3") != store.url.startswith("s3://"):
        rule = "s3://BUCKET or s3://BUCKET/PREFIX" if store.kind == "s3" else "a directory"
        yield f"weights.store.url is '{store.url}' with kind {store.kind} (rule: {rule})"
    elif store.kind == "s3" and not store.url.removeprefix("s3://").partition("/")[0]:
        yield f"weights.store.url is '{store.url}' (rule: s3://BUCKET or s3://BUCKET/PREFIX)"
    if store.local is not None and not PurePosixPath(store.local).is_absolute():
        yield f"weights.store.local is '{store.local}' (rule: an absolute path)"


def _columns(run: RunSpec) -> Violations:
    """A column is filled once, from data that is available before the batch is complete."""
    columns = run.training.columns
    if len(set(columns)) < len(columns):
        yield f"training.columns is {', '.join(columns)} (rule: each at most once)"
    if "ref_logprobs" in columns and not run.training.loss.kl:
        yield "training.columns has ref_logprobs (rule: with training.loss.kl above 0)"
    if "advantage" not in columns:
        return
    if run.batch.sampler == "token_budget":
        yield (
            "training.columns has advantage with batch.sampler token_budget (rule: fifo or deadline; baselines are "
            "over the samples that are trained)"
        )
    yield from _batch_baselines(run, "advantage in training.columns")


def _device_types(cluster: ClusterSpec) -> Violations:
    """Figures of a new device type have a known base; a computed plan needs the figures of every type."""
    for i, device in enumerate(cluster.devices):
        if device.base is not None and not known_device(device.base):
            hint = did_you_mean(device.base, catalogue())
            yield f"devices.{i}.base is '{device.base}' (rule: a type of the catalogue{hint})"
    own = {d.name for d in cluster.devices} | {"cpu"}
    if cluster.engines.fixed or own >= {p.device for p in cluster.pools}:
        return
    for i, pool in enumerate(cluster.pools):
        if pool.device not in own and not known_device(pool.device):
            hint = did_you_mean(pool.device, [*sorted(own), *catalogue()])
            rule = f"for a computed plan, a type of the catalogue or of `devices`{hint}"
            yield _at(f"pools.{i}.device", f"pool '{pool.name}': device is '{pool.device}' (rule: {rule})")


def _links(cluster: ClusterSpec) -> Violations:
    names = [*(p.name for p in cluster.pools), STORE]
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(cluster.links):
        for end, name in (("a", link.a), ("b", link.b)):
            if name not in names:
                hint = did_you_mean(name, names)
                yield f"links.{i}.{end} is '{name}' (rule: the name of a pool, or {STORE}{hint})"
        pair = frozenset((link.a, link.b))
        if pair in seen:
            yield _at(f"links.{i}", f"the link of '{link.a}' and '{link.b}' is given twice (rule: once)")
        seen.add(pair)


def _engines(cluster: ClusterSpec) -> Violations:
    engines, trainer = cluster.engines, cluster.trainer
    if (engines.prefill is None) != (engines.decode is None):
        lone, other = ("prefill", "decode") if engines.decode is None else ("decode", "prefill")
        yield f"engines.{lone} is given alone (rule: with engines.{other})"
    if engines.attach and engines.kind != "vllm":
        yield "engines.attach is given (rule: only with `kind: vllm`)"
    n, total = len(engines.attach), sum(n or 0 for n in (engines.count, engines.prefill, engines.decode))
    if n and n != total:
        yield f"engines.attach names {n} servers (rule: as many as count, prefill and decode, {total})"
    if engines.fixed and (trainer.ranks or 1) > trainer.threads:
        yield f"trainer.ranks is {trainer.ranks} (rule: at most trainer.threads, {trainer.threads}: a device each)"


def _wanted(cluster: ClusterSpec) -> Violations:
    """The devices and pools that parts ask for are in the cluster."""
    devices, pools = [pool.device for pool in cluster.pools], [pool.name for pool in cluster.pools]
    for path, wanted, known, rule in (
        ("engines.device", cluster.engines.device, devices, "the device of a pool"),
        ("trainer.device", cluster.trainer.device, devices, "the device of a pool"),
        ("environments.pool", cluster.environments.pool, pools, "a pool of the cluster"),
        ("functions.local.pool", cluster.functions.local.pool, pools, "a pool of the cluster"),
    ):
        if wanted is not None and wanted not in known:
            yield f"{path} is '{wanted}' (rule: {rule}{did_you_mean(wanted, known)})"


def _environments(cluster: ClusterSpec) -> Violations:
    spec = cluster.environments
    if spec.warm > spec.per_worker:
        yield f"environments.warm is {spec.warm} (rule: at most per_worker, {spec.per_worker})"
    if spec.reuse > 1 and not spec.warm:
        yield f"environments.reuse is {spec.reuse} with warm 0 (rule: no more than `warm` are kept for reuse)"
