"""The exception that ends a trajectory without a sample."""

from __future__ import annotations

from rollart.errors import EnvironmentFault, LeaseExpired, one_line
from rollart.model import AbortReason
from rollart.ports import Environment
from rollart.runtime.hosting import host_of

__all__ = ["TrajectoryAborted", "environment_fault"]


class TrajectoryAborted(Exception):
    """A trajectory ends without a sample, for a reason that the ledger records. Data, not a crash.

    `host`: the environment host at fault, if any; `incident`: the host failure that ended it, which several
    trajectories may share."""

    def __init__(self, reason: AbortReason, detail: str = "", *, host: str = "", incident: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.host = host
        self.incident = incident


def environment_fault(what: str, error: Exception, environment: Environment | None) -> TrajectoryAborted:
    """An environment's error as an abort whose detail names the host and the command that shows its log."""
    own = host_of(environment)
    host, incident = own, ""
    if isinstance(error, LeaseExpired):
        detail = f"{error.cause} on {own}" if own else error.cause
    elif isinstance(error, EnvironmentFault):
        host, incident = error.host, error.incident
        detail = f"environment {what} on {host}: {error.what}"
    else:
        detail = f"environment {what} raised {one_line(error, 500)}"
    remedy = f" (rollart logs --role {own})" if own else ""
    return TrajectoryAborted(AbortReason.INFRA_FAULT, detail + remedy, host=host, incident=incident)
