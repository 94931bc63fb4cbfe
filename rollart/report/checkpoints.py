"""Versions of a run that are on disk, with their scores, and the choice of one of them by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.errors import UsageError
from rollart.ledger.reader import LedgerReader

LATEST, BEST = "latest", "best"
"""Names of versions beside `v40`."""

SHOWN = 12
"""Most versions that an error lists."""


@dataclass(frozen=True, slots=True)
class HeldOutSuccess:
    """Share of successes among the `episodes` of an evaluation that ended with a verdict."""

    rate: float
    episodes: int


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A complete version on disk. `step`: training steps that it has had. `success`: by domain, of the last evaluation
    under this version; empty if there was none."""

    version: int
    step: int
    path: Path
    success: Mapping[str, HeldOutSuccess]

    @property
    def score(self) -> float | None:
        """Mean held-out success of the domains; None without an evaluation."""
        return sum(one.rate for one in self.success.values()) / len(self.success) if self.success else None


def kept_versions(directory: Path, reader: LedgerReader) -> list[KeptVersion]:
    """The committed versions that are complete on disk, the oldest first."""
    store, scores = DirectoryWeightStore(directory / "weights"), held_out_success(reader)
    steps = {row.version: row.step for row in reader.versions()}
    return [
        KeptVersion(version, steps[version], Path(store.path(version)), scores.get(version, {}))
        for version in store.versions()
        if version in steps
    ]


def held_out_success(reader: LedgerReader) -> dict[int, dict[str, HeldOutSuccess]]:
    """Held-out success by version and domain, of the last evaluation of each. Evaluations of versions that a resume
    gave up do not count: their numbers name other weights now."""
    found: dict[int, dict[str, HeldOutSuccess]] = defaultdict(dict)
    for event in sorted((e for kind in ("evaluation", "version_lost") for e in reader.events(kind)), key=lambda e: e.t):
        version, success = int(event.fields["version"] or 0), event.fields.get("success")
        if event.kind == "version_lost":
            for lost in [v for v in found if v > version]:
                del found[lost]
        elif success is not None:
            found[version][event.subject] = HeldOutSuccess(float(success), int(event.fields["episodes"] or 0))
    return dict(found)


def choose_version(kept: Sequence[KeptVersion], name: str, run: str) -> KeptVersion:
    """The version called `latest`, `best` (highest mean held-out success; ties: the later one) or `v40`. `UsageError`
    with the versions that exist if there is none."""
    if not kept:
        raise UsageError(f"run '{run}' has no version on disk", remedy="it has not published one yet, or it was moved")
    if name == LATEST:
        return kept[-1]
    if name == BEST:
        scored = [(one.score, one.version, one) for one in kept if one.score is not None]
        if not scored:
            raise UsageError(
                f"no version of run '{run}' on disk was evaluated, so none is the best; there are {listed(kept)}",
                remedy="name one of them, or evaluate the next run (evaluation.episodes)",
            )
        return max(scored)[2]
    if re.fullmatch(r"v?\d+", name) is None:
        raise UsageError(f"version '{name}' (rule: best, latest or a number, as v40)", remedy=f"one of {listed(kept)}")
    number = int(name.removeprefix("v"))
    found = next((one for one in kept if one.version == number), None)
    if found is None:
        state = "was not kept" if number < kept[-1].version else "does not exist"
        raise UsageError(f"v{number} of run '{run}' {state}; there are {listed(kept)}", remedy="name one of them")
    return found


def listed(kept: Sequence[KeptVersion]) -> str:
    """Their names: the first and the last ones, if there are many."""
    names = [f"v{one.version}" for one in kept]
    return ", ".join(names if len(names) <= SHOWN else [*names[: SHOWN // 2], "…", *names[-SHOWN // 2 :]])
