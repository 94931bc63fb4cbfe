"""UTC time of a run's seconds. A ledger counts seconds of the run, without the time between two lives of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

HOUR_S = 3600


class UtcTimes:
    """Unix seconds (UTC) of seconds of the run, from the start of each life as `(second of the run, Unix second)`, in
    order; at least one. Seconds before the first start belong to it."""

    def __init__(self, starts: Sequence[tuple[float, float]]) -> None:
        if not starts:
            raise ValueError("no start of a life (rule: at least one)")
        self._seconds = [second for second, _ in starts]
        self._offsets = [unix_s - second for second, unix_s in starts]

    def unix_s(self, second: float) -> float:
        return second + self._offsets[max(0, bisect_right(self._seconds, second) - 1)]

    def sql(self, column: str) -> str:
        """The same for a column of the ledger, as an SQL expression."""
        first, *later = zip(self._seconds, self._offsets, strict=True)
        cases = "".join(f" WHEN {column} >= {second!r} THEN {offset!r}" for second, offset in reversed(later))
        return f"({column} + CASE{cases} ELSE {first[1]!r} END)" if cases else f"({column} + {first[1]!r})"


def hourly_parts(start_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """The hours of UTC, counted from 1970, that a stretch of Unix seconds touches, with its seconds in each."""
    hour = int(start_s // HOUR_S)
    while start_s < end_s:
        until = min(end_s, (hour + 1.0) * HOUR_S)
        yield hour, until - start_s
        start_s, hour = until, hour + 1
