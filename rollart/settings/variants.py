"""Variants of specs: small changes for `rollart plan --what-if`, and a run under another schedule than its own. Pure.

What-if changes are to hardware, prices, links, model and objective. Names are case-insensitive:

    h20=+32  h20=-8  h20=64      devices of a pool, by its name or its device type; a type that the cluster lacks makes
                                 a new pool, and 0 takes the pool away
    price.h800=4.10              dollars per device-hour
    link.h800-h20=25             GB/s between two pools, or of one and `store`; a new link if there is none
    model=DIR_OR_CONFIG.json     another model
    in_flight= rate= budget= objective= prefill_decode= utilisation= staleness= batch= train.devices= train.pool=
                                 keys of the run spec
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from placement.hardware import canonical
from placement.publish import STORE
from rollart.errors import SpecError, UsageError, did_you_mean, some_of
from rollart.settings.base import SpecEntry
from rollart.settings.cluster import ClusterSpec
from rollart.settings.document import parse_value
from rollart.settings.load import value_problem
from rollart.settings.planning import Specs
from rollart.settings.rules import RuleViolation, cluster_problems, run_problems
from rollart.settings.run import LAG, RunSpec

Values = dict[str, Any]

SpecModel = TypeVar("SpecModel", RunSpec, ClusterSpec)

SpecSection = TypeVar("SpecSection", bound=SpecEntry)

RUN_KEYS: dict[str, tuple[str, ...]] = {
    "in_flight": ("placement", "in_flight"),
    "rate": ("placement", "rate"),
    "budget": ("placement", "budget_usd_per_hour"),
    "objective": ("placement", "objective"),
    "prefill_decode": ("placement", "prefill_decode"),
    "utilisation": ("placement", "utilisation"),
    "train.devices": ("placement", "train", "devices"),
    "train.pool": ("placement", "train", "pool"),
    "staleness": ("staleness",),
    "batch": ("batch", "trajectories"),
}
"""Short names of run spec keys."""


def apply_changes(specs: Specs, changes: Sequence[str]) -> Specs:
    """The specs with the changes applied in order. UsageError for a change that is not understood, SpecError for a
    change that breaks a rule; both name the change."""
    run, cluster = specs.run.model_dump(mode="json"), specs.cluster.model_dump(mode="json")
    given = {text.partition("=")[0] for text in changes}
    for text in changes:
        key, separator, value = text.partition("=")
        if not separator or not key or not value:
            raise UsageError(
                f"--what-if '{text}' is not key=value", remedy="write it like h20=+32, price.h800=4.10 or in_flight=512"
            )
        _change(run, cluster, key, value, text)
    if "objective" in given and "rate" not in given and run["placement"]["objective"] != "min_cost":
        run["placement"]["rate"] = None  # the rate belonged to the replaced objective
    return replace(
        specs,
        run=_validated(RunSpec, run, changes, run_problems),
        cluster=_validated(ClusterSpec, cluster, changes, cluster_problems),
    )


def adapt_to_schedule(run: RunSpec, schedule: str) -> tuple[RunSpec, tuple[str, ...]]:
    """The run without the settings that its spec could not have under `schedule`, and the names of those settings. Its
    `schedule` and `staleness` are unchanged: the caller of the simulation chooses them."""
    if schedule == run.schedule or {schedule, run.schedule} == {"rollart", "async"}:
        return run, ()
    batches, left = schedule in LAG, list[str]()

    def leave_out(name: str, section: SpecSection, **values: object) -> SpecSection:
        left.append(name)
        return section.model_copy(update=values)

    rollout, weights, batch = run.rollout, run.weights, run.batch
    if rollout.tail_batching is not None and schedule not in ("sync", "sync_plus"):
        rollout = leave_out("rollout.tail_batching", rollout, tail_batching=None)
    if rollout.lending is not None and schedule != "sync_plus":
        rollout = leave_out("rollout.lending", rollout, lending=None)
    if rollout.dispatch != "fifo" and schedule == "sync":
        rollout = leave_out(f"rollout.dispatch={rollout.dispatch}", rollout, dispatch="fifo")
    if rollout.concurrency.mode == "on" and schedule == "sync":
        left.append("rollout.concurrency")
    if batches and weights.update != "all":
        only = {"longest_s": None, "fraction": None, "threshold": None}
        weights = leave_out(f"weights.update={weights.update}", weights, update="all", **only)
    if batches and batch.sampler == "deadline":
        batch = leave_out("batch.sampler=deadline", batch, sampler="fifo", deadline_s=None, least=None)
    elif batches and batch.sampler == "fifo" and batch.tokens is not None:
        batch = leave_out("batch.tokens", batch, tokens=None)
    return run.model_copy(update={"rollout": rollout, "weights": weights, "batch": batch}), tuple(left)


def _change(run: Values, cluster: Values, key: str, value: str, text: str) -> None:
    head, _, rest = key.partition(".")
    if key == "model":
        run["model"] = {**run["model"], "config": os.path.abspath(value)}
    elif key in RUN_KEYS:
        at = run
        for part in RUN_KEYS[key][:-1]:
            at = at[part]
        at[RUN_KEYS[key][-1]] = parse_value(value, name=f"--what-if '{_truncated(text)}'")
        if key == "batch":
            for domain in run["domains"]:  # another batch size has the same mix
                if domain["trajectories"] is not None:
                    domain["weight"], domain["trajectories"] = float(domain["trajectories"]), None
    elif head == "price" and rest:
        for pool in _pools(cluster, rest, text):
            pool["price"] = _number(value, text)
    elif head == "link" and rest:
        _link(cluster, rest, _number(value, text), text)
    else:
        _count(cluster, key, value, text)


def _count(cluster: Values, name: str, value: str, text: str) -> None:
    relative = value[0] in "+-"
    try:
        amount = int(value)
    except ValueError:
        raise UsageError(
            f"--what-if '{_truncated(text)}': '{_truncated(value)}' is no number of devices (rule: 64, +32 or -8)"
        ) from None
    found = _pools_matching(cluster, name)
    if not found and amount > 0:
        cluster["pools"].append({"name": name.lower(), "device": _type(cluster, name, text), "count": amount})
        return
    pools = _pools(cluster, name, text)
    if len(pools) > 1:
        names = some_of(p["name"] for p in pools)
        raise UsageError(f"--what-if '{text}': several pools have '{name}'", remedy=f"name one of {names}")
    count = pools[0]["count"] + amount if relative else amount
    if count < 0:
        raise UsageError(f"--what-if '{text}': pool '{pools[0]['name']}' has {pools[0]['count']} devices")
    pools[0]["count"] = count
    if count == 0:
        gone = pools[0]["name"]
        cluster["pools"].remove(pools[0])
        cluster["links"] = [link for link in cluster["links"] if gone not in (link["a"], link["b"])]


def _link(cluster: Values, ends: str, gb_per_s: float, text: str) -> None:
    """Set the link's bandwidth. Pool names may contain '-', so every split of `ends` is tried."""
    parts = ends.split("-")
    for cut in range(1, len(parts)):
        names = "-".join(parts[:cut]), "-".join(parts[cut:])
        a, b = (  # pools, else the store of weight versions
            [pool["name"] for pool in _pools_matching(cluster, name)] or [STORE] * (name.lower() == STORE)
            for name in names
        )
        if len(a) == 1 and len(b) == 1:
            pair = {a[0], b[0]}
            for link in cluster["links"]:
                if {link["a"], link["b"]} == pair:
                    link["gb_per_s"] = gb_per_s
                    return
            cluster["links"].append({"a": a[0], "b": b[0], "gb_per_s": gb_per_s})
            return
    known = some_of(p["name"] for p in cluster["pools"])
    raise UsageError(f"--what-if '{text}': '{ends}' is no pair of pools (rule: link.a-b; pools: {known})")


def _pools_matching(cluster: Values, name: str) -> list[Values]:
    """Pools of that name, else pools of that device type."""
    wanted = name.lower()
    by_name = [p for p in cluster["pools"] if p["name"].lower() == wanted]
    return by_name or [p for p in cluster["pools"] if p["device"].lower() == wanted]


def _pools(cluster: Values, name: str, text: str) -> list[Values]:
    found = _pools_matching(cluster, name)
    if not found:
        raise _unknown(cluster, name, text)
    return found


def _unknown(cluster: Values, name: str, text: str) -> UsageError:
    known = [
        *(p["name"] for p in cluster["pools"]),
        *sorted({p["device"] for p in cluster["pools"]}),
        *RUN_KEYS,
        "model",
    ]
    hint = did_you_mean(name.lower(), dict.fromkeys(k.lower() for k in known))
    return UsageError(
        f"--what-if '{text}': there is no '{name}'{hint}",
        remedy="name a pool, a device type, price.POOL, link.A-B, model or a key such as in_flight",
    )


def _type(cluster: Values, name: str, text: str) -> str:
    """The device type of a new pool."""
    for candidate in (name, name.upper()):
        try:
            return canonical(candidate)
        except ValueError:
            continue
    raise _unknown(cluster, name, text)


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"--what-if '{_truncated(text)}': '{_truncated(value)}' is no number") from None


def _truncated(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _validated(
    model: type[SpecModel],
    values: Values,
    changes: Sequence[str],
    rules: Callable[[SpecModel], Sequence[RuleViolation]],
) -> SpecModel:
    option = f"--what-if '{_truncated(' '.join(changes))}'"
    try:
        spec = model.model_validate(copy.deepcopy(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{option}: {value_problem(first, key)}") from None
    problems = rules(spec)
    if problems:
        raise SpecError("\n".join(f"{option}: {problem.message}" for problem in problems))
    return spec
