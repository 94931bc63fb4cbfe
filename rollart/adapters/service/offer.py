"""The desk of a run's batches: one is on offer at a time, and a version is taken from whoever was given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollart.adapters.service.desk import ServiceState
from rollart.adapters.service.store import ServiceStore
from rollart.adapters.service.terms import ExperienceRow, RequestRefused, ServiceSetup

__all__ = ["BridgeState"]


class BridgeState(ServiceState):
    """As `ServiceState`, and a version may be announced only if it is the one that the batch on offer makes, by a
    trainer that
    could know that batch: a slow one that took an earlier offer is told so, and nothing is counted as trained that
    nobody was given."""

    def __init__(self, setup: ServiceSetup, store: ServiceStore | None = None) -> None:
        super().__init__(setup, store)
        self.offered = ""
        """The group on offer."""
        self.due: int | None = None
        """The version that it makes."""
        self.taken = False
        self.changed: Callable[[], None] = lambda: None
        """Called when an offer is made, taken or over, and when a version is announced."""

    def offer(self, group: str, version: int) -> None:
        self.offered, self.due, self.taken = group, version, False
        self.changed()

    def over(self) -> None:
        self.offered, self.due, self.taken = "", None, False
        self.changed()

    def permit(self, version: int, group: str) -> None:
        if version <= self.version or (version == 0 and self.version < 0):
            return
        if self.due is None or version != self.due:
            what = "no batch is on offer" if self.due is None else f"the batch on offer makes v{self.due}"
            raise RequestRefused(f"v{version} is not due: {what} (rule: take a batch, step, announce its version)", 409)
        if not self.taken or (group and group != self.offered):
            raise RequestRefused(
                f"v{version} was not made of the batch on offer: the run gave up the one before (rule: take it again)",
                409,
            )

    async def notify(self, version: int, path: str, group: str = "") -> None:
        await super().notify(version, path, group)
        self.changed()

    def _given(self, row: str, columns: Sequence[str]) -> ExperienceRow:
        given = super()._given(row, columns)
        if given.group == self.offered and not self.taken:
            self.taken = True
            self.changed()
        return given
