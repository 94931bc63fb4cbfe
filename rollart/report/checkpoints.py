"""Versions of a run that are on disk, with their scores, and the choice of one of them by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.errors import UsageError
from rollart.ledger.reader import LedgerReader
from rollart.policy.checkpoints import SUCCESS, metric_value
from rollart.ports import RunEvent

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
    under this version; empty if there was none. `score`: by which the best version is chosen; None if unknown."""

    version: int
    step: int
    path: Path
    success: Mapping[str, HeldOutSuccess]
    score: float | None


def kept_versions(directory: Path, reader: LedgerReader) -> list[KeptVersion]:
    """The committed versions that are complete on disk, the oldest first. Their scores are by the run's
    `checkpoints.best_by`, or else by mean held-out success."""
    metric = reader.config().get("run", {}).get("checkpoints", {}).get("best_by") or SUCCESS
    store, success = DirectoryWeightStore(directory / "weights"), held_out_success(reader)
    steps, scores = {row.version: row.step for row in reader.versions()}, version_scores(reader, metric)
    return [
        KeptVersion(version, steps[version], Path(store.path(version)), success.get(version, {}), scores.get(version))
        for version in store.versions()
        if version in steps
    ]


def held_out_success(reader: LedgerReader) -> dict[int, dict[str, HeldOutSuccess]]:
    """Success on held-out episodes by version and domain, of the last evaluation of each."""
    found: dict[int, dict[str, HeldOutSuccess]] = defaultdict(dict)
    for event in _still_valid(reader, "evaluation", found):
        version, success = int(event.fields["version"] or 0), event.fields.get("success")
        if success is not None:
            found[version][event.subject] = HeldOutSuccess(float(success), int(event.fields["episodes"] or 0))
    return dict(found)


def version_scores(reader: LedgerReader, metric: str) -> dict[int, float]:
    """The metric of `checkpoints.best_by` by version, where it is known."""
    by_domain: dict[int, dict[str, float | None]] = {}
    if metric.partition(".")[0] == SUCCESS:
        by_domain.update(
            (v, {name: one.rate for name, one in of.items()}) for v, of in held_out_success(reader).items()
        )
    else:
        for event in _still_valid(reader, "step", by_domain):
            scores = {k.removeprefix("score."): v for k, v in event.fields.items() if k.startswith("score.")}
            # The batch of a step was rolled out under the version before it.
            by_domain[int(event.fields["version"] or 0) - 1] = {k: float(v) for k, v in scores.items() if v is not None}
    values = {v: metric_value(metric, metric.partition(".")[0], of) for v, of in by_domain.items()}
    return {version: value for version, value in values.items() if value is not None}


def best_version(directory: Path, metric: str, newest: int) -> tuple[float, int] | None:
    """Score and number of the best version on disk; None for a new run. Versions after `newest` are those that a resume
    has given up: their numbers will name other weights."""
    on_disk = [v for v in DirectoryWeightStore(directory / "weights").versions() if v <= newest]
    with LedgerReader(directory) as reader:
        scores = version_scores(reader, metric)
    return max(((scores[version], version) for version in on_disk if version in scores), default=None)


def _still_valid(reader: LedgerReader, kind: str, found: MutableMapping[int, Any]) -> Iterator[RunEvent]:
    """Events of a kind by time. Where a resume gave versions up, they leave `found`: their numbers name other weights
    afterwards."""
    for event in sorted((e for one in (kind, "version_lost") for e in reader.events(one)), key=lambda e: e.t):
        if event.kind == kind:
            yield event
            continue
        for lost in [v for v in found if v > int(event.fields["version"] or 0)]:
            del found[lost]


def choose_version(kept: Sequence[KeptVersion], name: str, run: str) -> KeptVersion:
    """The version called `latest`, `best` (highest score; ties: the later one) or `v40`. `UsageError`
    with the versions that exist if there is none."""
    if not kept:
        raise UsageError(f"run '{run}' has no version on disk", remedy="it has not published one yet, or it was moved")
    if name == LATEST:
        return kept[-1]
    if name == BEST:
        scored = [(one.score, one.version, one) for one in kept if one.score is not None]
        if not scored:
            raise UsageError(
                f"no version of run '{run}' on disk has a score, so none is the best; there are {listed(kept)}",
                remedy="name one of them; an evaluation (evaluation.episodes) gives a version its score",
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
