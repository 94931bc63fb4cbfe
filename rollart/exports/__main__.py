"""`python -m rollart.exports DIRECTORY TELEMETRY`: export the run in a directory until SIGTERM, and its rest then.

TELEMETRY is the run's `TelemetrySpec` as JSON. Prints one line of JSON once everything is ready: `{"metrics": URL}`, or
`{"error": ..., "remedy": ...}` and exit code 2.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rollart.errors import RollartError
from rollart.ledger.reader import LedgerReader
from rollart.settings.telemetry import TelemetrySpec

logger = logging.getLogger("rollart.exports")

LOOK_S = 1.0
"""Seconds between two readings of the ledger."""


class LedgerFollower(Protocol):
    """Exports what has been written to the ledger since its last look."""

    def look(self, reader: LedgerReader) -> None: ...

    def close(self, reader: LedgerReader) -> None:
        """Export the rest: the run is over."""


def main(directory: Path, spec: TelemetrySpec) -> int:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, which the run itself answers
    ready: dict[str, str] = {}
    try:
        if spec.metrics is not None:
            from rollart.exports.metrics import serve_metrics  # late, like the others: each needs an extra

            ready["metrics"] = serve_metrics(directory, spec.metrics)
        with _ledger(directory) as earlier:
            followers = _followers(directory, spec, earlier)
    except RollartError as error:
        print(json.dumps({"error": error.message, "remedy": error.remedy}), flush=True)
        return error.exit_code
    print(json.dumps(ready), flush=True)
    _follow(directory, followers, stop)
    return 0


def _followers(directory: Path, spec: TelemetrySpec, earlier: LedgerReader | None) -> list[LedgerFollower]:
    found: list[LedgerFollower] = []
    if spec.otlp is not None:
        from rollart.exports.spans import MetricFollower, SpanFollower

        found += [SpanFollower(directory, spec.otlp, earlier), MetricFollower(directory, spec.otlp)]
    if spec.track:
        from rollart.exports.trackers import TrackerFollower

        found.append(TrackerFollower(directory, spec.track, earlier))
    return found


def _follow(directory: Path, followers: list[LedgerFollower], stop: threading.Event) -> None:
    """The ledger is open for each look alone: SQLite completes its file when the last connection is closed, which is to
    be the run's."""
    over = False
    while not over:
        over = stop.wait(LOOK_S if followers else None)
        with _ledger(directory) as reader:
            if reader is None:
                continue
            for follower in [*followers]:
                try:
                    (follower.close if over else follower.look)(reader)
                except Exception:  # a client's own: the others go on
                    logger.exception("%s ended", type(follower).__name__)
                    followers.remove(follower)


@contextlib.contextmanager
def _ledger(directory: Path) -> Iterator[LedgerReader | None]:
    """The run's ledger; None as long as there is none."""
    try:
        reader = LedgerReader(directory)
    except RollartError:  # or it is being made
        yield None
        return
    with reader:
        yield reader


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), TelemetrySpec.model_validate_json(sys.argv[2])))
