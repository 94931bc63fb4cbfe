"""A function's deployments on Modal: one app per function, whose tags map deployments to package versions.

    rollart-live   3              the deployment that calls go to (Modal counts an app's deployments from 1)
    rollart-v3     <digest>       the package version of deployment 3, base64url (a tag holds 63 characters)
    rollart-t3     1767225600     when it was made, Unix seconds

Modal keeps deployments and looks any of them up by number (`Function.from_name(version=)`), so a rollback is one
`App.set_tags`, which is atomic, and a deployment that fails is never live.
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serverless.backends.modal_client import modal_library, translate_errors
from serverless.errors import SpecInvalid, UnknownFunction

if TYPE_CHECKING:
    import modal

__all__ = ["FUNCTION", "PROVIDER", "DeploymentTags", "ModalSettings", "ModalNamespace"]

PROVIDER = "modal"

FUNCTION = "call"
"""The name of the one Modal function of an app: that of `serverless.deploy.modal_entry`."""

_NAME = 63
"""Maximum characters of an app's name."""


@dataclass(frozen=True, slots=True)
class ModalSettings:
    """Settings of functions on Modal. `python` is the minor version of the interpreter in the container ('' for this
    one's); `keep` is the number of versions before the live one that are kept for a rollback."""

    prefix: str = "rollart-"
    environment: str = ""
    python: str = ""
    keep: int = 5


@dataclass(frozen=True, slots=True)
class DeploymentTags:
    """The parsed tags of an app. `versions` are digests by deployment number, `times` Unix seconds likewise."""

    live: int = 0
    versions: Mapping[int, str] = field(default_factory=dict)
    times: Mapping[int, int] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)
    """Foreign tags, which are preserved."""

    @classmethod
    def read(cls, tags: Mapping[str, str]) -> DeploymentTags:
        live, versions, times, other = 0, {}, {}, {}
        for key, value in tags.items():
            number = int(key[9:]) if key[:9] in ("rollart-v", "rollart-t") and key[9:].isdigit() else 0
            if key == "rollart-live":
                live = int(value) if value.isdigit() else 0
            elif number and key[8] == "v":
                versions[number] = _hex(value)
            elif number:
                times[number] = int(value) if value.isdigit() else 0
            else:
                other[key] = value
        return cls(live if live in versions else 0, versions, times, other)

    def tags(self) -> dict[str, str]:
        tags = dict(self.other)
        tags |= {f"rollart-v{n}": _base64(digest) for n, digest in self.versions.items()}
        tags |= {f"rollart-t{n}": str(t) for n, t in self.times.items() if n in self.versions}
        return tags | ({"rollart-live": str(self.live)} if self.live else {})

    def pointed(self, number: int) -> DeploymentTags:
        return DeploymentTags(number, self.versions, self.times, self.other)

    def added(self, number: int, digest: str, t: float, *, keep: int) -> DeploymentTags:
        """The tags with a new live version and the newest `keep` of the older ones."""
        versions = {**self.versions, number: digest}
        kept = sorted(versions, reverse=True)[: keep + 1]
        return DeploymentTags(number, {n: versions[n] for n in kept}, {**self.times, number: int(t)}, self.other)

    def created(self, number: int) -> str:
        if number not in self.times:
            return ""
        return datetime.datetime.fromtimestamp(self.times[number], datetime.UTC).isoformat()


@dataclass(frozen=True, slots=True)
class ModalNamespace:
    """Names and look-ups in a Modal environment. `environment` '' is the configured one."""

    client: modal.Client
    prefix: str
    environment: str = ""

    def app(self, function: str) -> str:
        name = self.prefix + function
        if len(name) > _NAME:
            raise SpecInvalid(f"{name!r} is {len(name)} characters long, an app's name on Modal at most {_NAME}")
        return name

    async def find(self, function: str) -> tuple[modal.App, DeploymentTags] | None:
        """The function's app and its tags, or None if there is no such app."""
        modal = modal_library()
        try:
            app = await modal.App.lookup.aio(
                self.app(function), client=self.client, environment_name=self.environment or None
            )
        except modal.exception.NotFoundError:
            return None
        return app, DeploymentTags.read(await app.get_tags.aio(client=self.client))

    async def get(self, function: str) -> tuple[modal.App, DeploymentTags]:
        """The app and tags of a deployed function. Raises `UnknownFunction` otherwise."""
        found = await self.find(function)
        if found is None or not found[1].live:
            known = ", ".join(await self.functions()) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed on Modal", remedy=f"deployed: {known}")
        return found

    def function(self, function: str, number: int) -> Any:
        """The `modal.Function` of one deployment, without a request to Modal."""
        return modal_library().Function.from_name(
            self.app(function),
            FUNCTION,
            version=number,
            client=self.client,
            environment_name=self.environment or None,
        )

    async def functions(self) -> list[str]:
        """The names of the functions that rollart deployed here, sorted."""
        modal = modal_library()
        with translate_errors():
            namespace = (
                modal.Environment.from_name(self.environment, client=self.client)
                if self.environment
                else modal.Environment.from_context(client=self.client)
            )
            apps = await namespace.apps.list.aio()
            names = [app for app in apps if (app.name or "").startswith(self.prefix)]
            live = [a for a in names if DeploymentTags.read(await a.get_tags.aio(client=self.client)).live]
        return sorted(str(app.name).removeprefix(self.prefix) for app in live)


def _base64(digest: str) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")


def _hex(tag: str) -> str:
    try:
        return base64.urlsafe_b64decode(tag + "=" * (-len(tag) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""
