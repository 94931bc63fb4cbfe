"""What the service's callers say: a setup, a wish, and how a call is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.policy.samplers import Balanced, Fifo, WholeGroups
from rollart.policy.table import Sampler, Selection

__all__ = [
    "Given",
    "Refused",
    "Setup",
    "Task",
    "Wish",
    "positive",
    "rules",
    "sampler_of",
    "setup_body",
    "setup_of",
    "these",
]


class Refused(Exception):
    """A call that breaks a rule, in words. `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Task:
    """A consumer's work: the columns it reads, and whether it takes groups whole."""

    columns: tuple[str, ...]
    whole_groups: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What all who share a service agree on. `staleness`: publishes that a sample may live through; None: any."""

    columns: tuple[str, ...]
    tasks: Mapping[str, Task]
    capacity: int = 4096
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for experience: `count` rows, or groups where the task takes them whole, for each of `consumers`."""

    task: str
    count: int
    at_least: int | None = None
    consumers: int = 1
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """A row on its way out."""

    id: str
    group: str
    version: int | None
    values: Mapping[str, Any]


def setup_body(setup: Setup) -> dict[str, Any]:
    tasks = {n: {"columns": list(t.columns), "whole_groups": t.whole_groups} for n, t in setup.tasks.items()}
    return {"columns": list(setup.columns), "tasks": tasks, "capacity": setup.capacity, "staleness": setup.staleness}


def setup_of(body: Mapping[str, Any]) -> Setup:
    tasks = {n: Task(tuple(t["columns"]), t["whole_groups"]) for n, t in body["tasks"].items()}
    return Setup(tuple(body["columns"]), tasks, body["capacity"], body["staleness"])


def sampler_of(wish: Wish, task: Task) -> Sampler:
    if wish.count < 1 or wish.consumers < 1:
        raise Refused(f"count {wish.count}, consumers {wish.consumers} (rule: at least 1)")
    sampler: Sampler
    if task.whole_groups:
        if wish.at_least is not None:
            raise Refused("at_least is for tasks that take single rows")
        sampler = WholeGroups(wish.count)
    else:
        sampler = Fifo(wish.count, wish.at_least)
    return Balanced(sampler, wish.consumers) if wish.consumers > 1 else sampler


def these(rows: Sequence[str]) -> Sampler:
    return lambda ready: Selection.of(ready.rows[row] for row in rows)


def positive(lease_s: float) -> None:
    if lease_s <= 0:
        raise Refused(f"lease_s {lease_s} (rule: above 0)")


class rules:
    """The table's ValueErrors are the caller's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise Refused(str(error)) from None
