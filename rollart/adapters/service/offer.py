"""The service state of the trainer bridge: one batch is offered at a time, and its version is accepted only from a
trainer that took the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollart.adapters.service.desk import ServiceState
from rollart.adapters.service.store import ServiceStore
from rollart.adapters.service.terms import ExperienceRow, RequestRefused, ServiceSetup

__all__ = ["BridgeState"]


class BridgeState(ServiceState):
    """As `ServiceState`, but a version may be announced only if it is the one due for the offered batch, and only after
    the batch was taken. A slow trainer that took an earlier batch gets an error, and a batch that no trainer took never
    counts as trained."""

    def __init__(self, setup: ServiceSetup, store: ServiceStore | None = None) -> None:
        super().__init__(setup, store)
        self.offered = ""
        """The group of the offered batch; '' if there is none."""
        self.due: int | None = None
        """The version that training on the offered batch produces."""
        self.taken = False
        self.changed: Callable[[], None] = lambda: None
        """Called when a batch is offered, taken or withdrawn, and when a version is announced."""

    def offer(self, group: str, version: int) -> None:
        self.offered, self.due, self.taken = group, version, False
        self.changed()

    def withdraw(self) -> None:
        self.offered, self.due, self.taken = "", None, False
        self.changed()

    def permit(self, version: int, group: str) -> None:
        if version <= self.version or (version == 0 and self.version < 0):
            return
        if self.due is None or version != self.due:
            reason = "no batch is on offer" if self.due is None else f"the batch on offer makes v{self.due}"
            raise RequestRefused(
                f"v{version} is not due: {reason} (rule: take a batch, step, announce its version)", 409
            )
        if not self.taken or (group and group != self.offered):
            raise RequestRefused(
                f"v{version} was not made of the batch on offer: the run gave up the one before (rule: take it again)",
                409,
            )

    async def notify(self, version: int, path: str, group: str = "") -> None:
        await super().notify(version, path, group)
        self.changed()

    def _experience_row(self, row: str, columns: Sequence[str]) -> ExperienceRow:
        experience = super()._experience_row(row, columns)
        if experience.group == self.offered and not self.taken:
            self.taken = True
            self.changed()
        return experience
