"""The error tree of serverless.

ServerlessError
├── SpecInvalid        a function's declaration breaks a rule
├── PackageError       its source or an artefact cannot be packed
│   └── NotOffloadable it keeps state between calls, so it must run beside its environment
├── UnknownFunction    a call names a function that is not deployed
├── BackendFailed      a backend cannot start or was closed
│   ├── CredentialsMissing  a provider knows no user, or refuses the one it knows
│   ├── FunctionFailed      the function itself does not work there: its user can repair it
│   ├── ExtraMissing        a provider's client library is not installed
│   ├── IndexUnreachable    a package index does not answer, so that wheels are not known
│   └── SandboxUnavailable  no isolation of untrusted programs works here
└── PolicyFault        raised *by a reward function*: the policy's own output made scoring impossible

A failed *call* is not an error here: it is an `InfraFault` value (`serverless.types`).
"""

from __future__ import annotations

__all__ = [
    "BackendFailed",
    "CredentialsMissing",
    "ExtraMissing",
    "FunctionFailed",
    "IndexUnreachable",
    "NotOffloadable",
    "PackageError",
    "PolicyFault",
    "SandboxUnavailable",
    "ServerlessError",
    "SpecInvalid",
    "UnknownFunction",
]


class ServerlessError(Exception):
    """Base of this package's errors: one line of cause, one of remedy."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class SpecInvalid(ServerlessError):
    pass


class PackageError(ServerlessError):
    pass


class NotOffloadable(PackageError):
    """`reasons` name the state and its location (`file:line: ...`)."""

    def __init__(self, function: str, reasons: tuple[str, ...], *, remedy: str) -> None:
        super().__init__(f"function {function} is not stateless: {'; '.join(reasons)}", remedy=remedy)
        self.reasons = reasons


class UnknownFunction(ServerlessError):
    pass


class BackendFailed(ServerlessError):
    pass


class CredentialsMissing(BackendFailed):
    pass


class ExtraMissing(BackendFailed):
    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed", remedy=f"pip install 'rollart[{extra}]'")


class FunctionFailed(BackendFailed):
    """The function does not load, fails its trial, or needs a library that is not installed."""


class IndexUnreachable(BackendFailed):
    pass


class SandboxUnavailable(BackendFailed):
    pass


class PolicyFault(ServerlessError):
    """Raise it in a reward function when the completion cannot be scored: it becomes `ModelFault(floor, reason)`.

    Any other exception is an `InfraFault(CRASH, retryable=False)`: the code failed, not the policy.
    """

    def __init__(self, reason: str, *, floor: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.floor = floor
