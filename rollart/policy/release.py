"""When a slot of the admission window is freed.

A consumed sample returns its slot after the publish of the version that it was trained into, not when it leaves the
buffer: otherwise rollout would run a batch ahead of the staleness bound. A dropped or aborted sample returns its slot
at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SlotLedger:
    """Slots held by each group. A group releases exactly the slots that it was admitted with."""

    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    outstanding: Counter[str] = field(default_factory=Counter)
    ahead: Counter[str] = field(default_factory=Counter)
    """The outstanding slots of groups that were not yet given to training."""
    ready: Counter[str] = field(default_factory=Counter)
    """The slots in `ahead` of complete groups."""
    _training: set[str] = field(default_factory=set)
    _ready: set[str] = field(default_factory=set)

    def admit(self, group: str, domain: str, samples: int) -> None:
        if group in self.held:
            raise ValueError(f"group {group} already holds slots")
        self.held[group] = (domain, samples)
        self.outstanding[domain] += samples
        self.ahead[domain] += samples

    def complete(self, group: str) -> None:
        """All samples that the group needs are present."""
        domain, samples = self.held[group]
        self._ready.add(group)
        self.ready[domain] += samples

    def incomplete(self, domain: str) -> list[str]:
        """The domain's groups that are neither complete nor in training, oldest first."""
        return [
            g for g, (d, _) in self.held.items() if d == domain and g not in self._ready and g not in self._training
        ]

    def train(self, group: str) -> None:
        """The group is in training, and no longer limits further starts."""
        if group not in self._training:
            domain, samples = self.held[group]
            self._training.add(group)
            self.ahead[domain] -= samples
            self._unready(group, domain, samples)

    def release(self, group: str) -> int:
        """Free the group's slots; returns their number. Releasing twice is a bug of the caller."""
        domain, samples = self.held.pop(group)
        self.outstanding[domain] -= samples
        if group in self._training:
            self._training.discard(group)
        else:
            self.ahead[domain] -= samples
        self._unready(group, domain, samples)
        return samples

    def _unready(self, group: str, domain: str, samples: int) -> None:
        if group in self._ready:
            self._ready.discard(group)
            self.ready[domain] -= samples
