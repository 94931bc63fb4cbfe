"""The service's request models: setup and experience request, and the error of a refused call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.policy.samplers import Balanced, Fifo, WholeGroups
from rollart.policy.table import Sampler, Selection

__all__ = [
    "ExperienceRow",
    "RequestRefused",
    "ServiceSetup",
    "ServiceTask",
    "ExperienceRequest",
    "require_positive_lease",
    "refuse_value_errors",
    "sampler_of",
    "setup_body",
    "decode_setup",
    "sampler_of_rows",
]


class RequestRefused(Exception):
    """A call that breaks a rule. The message is for the caller; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServiceTask:
    """A consuming task: the columns that it reads, and whether it takes whole groups."""

    columns: tuple[str, ...]
    whole_groups: bool = False


@dataclass(frozen=True, slots=True)
class ServiceSetup:
    """The configuration shared by all clients of a service. `staleness`: publishes that a sample may outlive; None:
    unlimited."""

    columns: tuple[str, ...]
    tasks: Mapping[str, ServiceTask]
    capacity: int = 4096
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class ExperienceRequest:
    """A request for experience: `count` rows, or groups if the task takes whole groups, for each of `consumers`."""

    task: str
    count: int
    at_least: int | None = None
    consumers: int = 1
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExperienceRow:
    """A row as it is handed to a consumer."""

    id: str
    group: str
    version: int | None
    values: Mapping[str, Any]


def setup_body(setup: ServiceSetup) -> dict[str, Any]:
    tasks = {n: {"columns": list(t.columns), "whole_groups": t.whole_groups} for n, t in setup.tasks.items()}
    return {"columns": list(setup.columns), "tasks": tasks, "capacity": setup.capacity, "staleness": setup.staleness}


def decode_setup(body: Mapping[str, Any]) -> ServiceSetup:
    tasks = {n: ServiceTask(tuple(t["columns"]), t["whole_groups"]) for n, t in body["tasks"].items()}
    return ServiceSetup(tuple(body["columns"]), tasks, body["capacity"], body["staleness"])


def sampler_of(request: ExperienceRequest, task: ServiceTask) -> Sampler:
    if request.count < 1 or request.consumers < 1:
        raise RequestRefused(f"count {request.count}, consumers {request.consumers} (rule: at least 1)")
    sampler: Sampler
    if task.whole_groups:
        if request.at_least is not None:
            raise RequestRefused("at_least is for tasks that take single rows")
        sampler = WholeGroups(request.count)
    else:
        sampler = Fifo(request.count, request.at_least)
    return Balanced(sampler, request.consumers) if request.consumers > 1 else sampler


def sampler_of_rows(rows: Sequence[str]) -> Sampler:
    return lambda ready: Selection.of(ready.rows[row] for row in rows)


def require_positive_lease(lease_s: float) -> None:
    if lease_s <= 0:
        raise RequestRefused(f"lease_s {lease_s} (rule: above 0)")


class refuse_value_errors:
    """Context manager that turns the table's ValueErrors into RequestRefused."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise RequestRefused(str(error)) from None
