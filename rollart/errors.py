"""The error tree of rollart.

RollartError                      exit code
├── UsageError                    2   the command line asks for something that is not there
│   └── SpecError                 2   a spec breaks a rule: carries file, line, column, value, rule, hint
├── ProviderError                 3   a provider or its credentials refused
├── BudgetExceeded                4
├── FaultRateExceeded             5   the share of infrastructure faults passed the run's threshold
├── StoppedEarly                  6   a condition of the run's `stop_when` was fulfilled
├── Interrupted                 130
└── RunFailed                     1
    ├── PartDied                  1   a process that the run needs is gone and may not be restarted again
    │   └── NoPlace               1   no present node has room for it
    ├── LeaseExpired              1   a wait passed its deadline and its action was to fail the run
    ├── StorageFailed             1   disk full, directory unwritable, ledger damaged
    ├── EnvironmentFault          1   an environment or its host failed a call: carries the host's name
    ├── EngineError               1   an engine answered with an error
    │   ├── HandoffFailed         1   the KV of a prefill could not be used: the engine is well, prefill elsewhere
    │   └── WrongAnswer           1   an engine's answer cannot be used: its fault, another engine is asked
    │       └── ForeignWeights    1   its weights differ from the published ones
    └── TrainerError              1
        └── TrainerRefused        1   the trainer refuses its input: a restart would not help
            └── VersionDamaged    1   a version differs from the published one: an older one may be intact

A message describes the problem with the value, and `remedy` the action to take. Both are one line.

The nearest known name to a wrong one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any


class RollartError(Exception):
    """Base of every error a user may see: one line of cause, one of remedy, an exit code."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Supports any constructor signature: actors on other nodes re-raise the error unchanged."""
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class UsageError(RollartError):
    exit_code = 2


class SpecError(UsageError):
    """A spec breaks a rule. `where` is `file:line:column`, or '' for an override or a default."""

    def __init__(self, message: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message, remedy=remedy)
        self.where = where


class ProviderError(RollartError):
    exit_code = 3


class BudgetExceeded(RollartError):
    exit_code = 4


class FaultRateExceeded(RollartError):
    exit_code = 5


class StoppedEarly(RollartError):
    exit_code = 6


class Interrupted(RollartError):
    exit_code = 130


class RunFailed(RollartError):
    exit_code = 1


class PartDied(RunFailed):
    """A process that the run needs is gone. `part` names it."""

    def __init__(self, part: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{part}: {message}", remedy=remedy)
        self.part = part


class NoPlace(PartDied):
    """No present node has room for the part; a suitable node may come."""


class LeaseExpired(RunFailed):
    """A wait passed its deadline. `owner` holds the lease, `waiting_for` names the awaited event; `cause` is the
    message without the owner, equal for all owners that waited for the same event."""

    def __init__(self, owner: str, waiting_for: str, seconds: float, *, remedy: str = "") -> None:
        self.cause = f"waited {seconds:.1f} s for {waiting_for}"
        super().__init__(f"{owner} {self.cause}", remedy=remedy)
        self.owner = owner
        self.waiting_for = waiting_for


class StorageFailed(RunFailed):
    pass


class EnvironmentFault(RunFailed):
    """A call to an environment on a host failed, or the host did. `host` names it; `what` describes the fault, and
    `message` ends with the host. `incident`: the end of the host, equal for all episodes that it ended."""

    def __init__(self, host: str, what: str, *, incident: str = "") -> None:
        super().__init__(f"{what} on {host}")
        self.host = host
        self.what = what
        self.incident = incident


class EngineError(RunFailed):
    """An engine refused or failed a request. `retryable`: another engine may succeed."""

    def __init__(self, message: str, *, retryable: bool, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.retryable = retryable


class HandoffFailed(EngineError):
    """KV from another engine was gone, refused or unreachable. The engine that reports this is healthy: the same
    request without the hand-off succeeds there."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, retryable=True, remedy=remedy)


class WrongAnswer(EngineError):
    """An unreadable answer, or one that breaks a rule of answers. It counts against the engine that gave it, whatever
    the result of its health check; another engine may answer the same request."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message, retryable=True, remedy=remedy)


class ForeignWeights(WrongAnswer):
    """The engine's weights differ from those published under the version's number: none of its answers can be used
    before it is restarted."""


class TrainerError(RunFailed):
    pass


class TrainerRefused(TrainerError):
    """`samples`: ids of the refused samples; empty if the whole batch or none of its samples is at fault."""

    def __init__(self, message: str, *, remedy: str = "", samples: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.samples = samples


class VersionDamaged(TrainerRefused):
    """The content of a version's directory differs from the published content. An unreadable file is no damage."""


def one_line(error: BaseException, most: int | None = None) -> str:
    """An exception from users' or third-party code as text: its type and its message, at most `most` characters."""
    try:
        text = str(error)
    except Exception:  # the exception's own `__str__` failed
        text = "(its text cannot be read)"
    return " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")[:most]


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of a third-party error's text, at most `most` characters; its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:most] if lines else type(error).__name__


def leaf_errors(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors inside task groups, in order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaf_errors(error)
        else:
            yield error


MAX_SUGGESTED = 12
"""Most names in one message."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, else `; known: a, b` for a short list, else ''."""
    known = list(known)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    if 0 < len(known) <= MAX_SUGGESTED:
        return f"; known: {', '.join(known)}"
    return ""


def some_of(names: Iterable[str]) -> str:
    """`a, b, c`; of a long list the first ones and the number of the others."""
    names = list(names)
    more = len(names) - MAX_SUGGESTED
    return ", ".join(names[:MAX_SUGGESTED]) + (f" and {more:,} more" if more > 0 else "")
