"""The boto3 clients of one account and region, and the translation of their errors."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from serverless.deploy.aws_function import AwsSettings
from serverless.errors import BackendFailed, CredentialsMissing, ExtraMissing, ServerlessError
from serverless.providers.faults import NOT_ALLOWED

_SIGN_IN = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or sign in: `aws configure` or `aws sso login`"

_NOT_SIGNED_IN = (
    "CredentialRetrievalError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "SSOError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
"""Names in botocore.exceptions."""


def library(name: str) -> Any:
    """Import a provider library. Raises `ExtraMissing` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ExtraMissing(name.partition(".")[0], "aws") from None


def error_code(error: BaseException) -> str:
    """The error code of a botocore `ClientError`, '' of any other error."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def translate_error(error: BaseException, doing: str) -> ServerlessError | None:
    """The error of this package for an error of botocore or aiobotocore; None for any other."""
    names = {one.__name__ for one in type(error).__mro__}
    if names.intersection(_NOT_SIGNED_IN):
        return CredentialsMissing(f"{doing}: AWS knows no user: {error}", remedy=_SIGN_IN)
    if "NoRegionError" in names:
        return BackendFailed(f"{doing}: no AWS region is set", remedy="set `region` in the settings, or AWS_REGION")
    if found := error_code(error):
        if found in NOT_ALLOWED:
            remedy = "grant it to this user" if found.startswith("AccessDenied") else _SIGN_IN
            return CredentialsMissing(f"{doing}: AWS refuses the user: {error}", remedy=remedy)
        return BackendFailed(f"{doing}: {error}")
    if names.intersection(("EndpointConnectionError", "ConnectionError", "HTTPClientError")):
        return BackendFailed(f"{doing}: {error}", remedy="check the network and the region")
    ours = names.intersection(("BotoCoreError", "WaiterError", "Boto3Error"))
    return BackendFailed(f"{doing}: {error}") if ours else None


@contextlib.contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Translate boto3's errors inside the block."""
    try:
        yield
    except Exception as error:
        ours = translate_error(error, doing)
        if ours is None:
            raise
        raise ours from error


class Boto3Clients:
    """boto3 clients by service, made at first use. Boto's clients may be shared by threads, its session may not: use
    `of` from one thread at a time."""

    def __init__(self, settings: AwsSettings) -> None:
        self._settings = settings
        self._made: dict[tuple[str, float], Any] = {}

    def of(self, service: str, *, once_s: float = 0.0) -> Any:
        """A client that retries failed requests, for the control plane; with `once_s`, a client that sends each request
        once and waits that long for its answer."""
        if (service, once_s) not in self._made:
            config = library("botocore.config").Config(
                connect_timeout=5,
                read_timeout=once_s or 60,
                tcp_keepalive=True,
                retries={"mode": "standard", "total_max_attempts": 1 if once_s else 5},
            )
            url = self._settings.endpoint_url
            self._made[service, once_s] = self._session.client(service, endpoint_url=url, config=config)
        return self._made[service, once_s]

    @functools.cached_property
    def _session(self) -> Any:
        region, profile = self._settings.region or None, self._settings.profile or None
        return library("boto3").session.Session(region_name=region, profile_name=profile)

    def close(self) -> None:
        for client in self._made.values():
            client.close()
        self._made.clear()
