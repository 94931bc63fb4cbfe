"""How a trajectory ends without a sample."""

from __future__ import annotations

from rollart.model import AbortReason

__all__ = ["Aborted"]


class Aborted(Exception):
    """A trajectory ends without a sample, for a reason that the ledger keeps. Data, not a crash.

    `host`: the environment host that failed it, if one did; `incident`: the end of a host, which others share."""

    def __init__(self, reason: AbortReason, detail: str = "", *, host: str = "", incident: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.host = host
        self.incident = incident
