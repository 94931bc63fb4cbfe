"""The conformance suite of secrets: where a value is, where it never is, and its rotation."""

from __future__ import annotations

import abc
import base64
import contextlib
import hashlib
import json
import pathlib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.pipeline.offload import Offload
from serverless.providers.base import Backend
from serverless.secrets import Secrets
from serverless.types import InfraFault, Outcome, Scored
from tests.serverless.support import Books, descendants, item, package

FIRST, SECOND = "sk-$first/+ value-0123456789", "sk-$second/+value-9876543210"

LIMIT_S = 60.0


class SecretsWorld(abc.ABC):
    """A provider with a secret store. `root` has all files that it writes on this machine."""

    name: str
    children = True
    """The output of child processes is masked."""
    shared = True
    """Workers are processes of one machine, which could look into each other."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.store, self.root = directory / "store", directory / "root"
        self.store.mkdir()
        self.root.mkdir()

    @property
    def secrets(self) -> Secrets:
        return Secrets(directory=self.store)

    async def rotate(self, value: str) -> None:
        """Give the secret JUDGE_KEY a value. The default is the `.env` file of local values."""
        (self.store / ".env").write_text(f"JUDGE_KEY='{value}'\n")

    @abc.abstractmethod
    def open(
        self, packages: Sequence[Package], meter: MeterSink
    ) -> contextlib.AbstractAsyncContextManager[Backend]: ...

    async def renewed(self, offload: Offload) -> None:
        """Return when the next call may have the new value, by the provider's documentation."""

    def shown(self) -> Iterator[bytes]:
        """What the provider has of the function: its configuration and logs."""
        return iter(())


def digest(value: str) -> float:
    return float(int(hashlib.sha256(value.encode()).hexdigest()[:8], 16))


def forms(value: str) -> list[bytes]:
    return [
        value.encode(),
        base64.b64encode(value.encode()).rstrip(b"=")[:-1],
        base64.b64encode(f"user:{value}".encode()),
        value.encode().hex().upper().encode(),
        urllib.parse.quote(value).encode(),
        json.dumps(value)[1:-1].encode(),
    ]


def leaks(*texts: bytes) -> list[bytes]:
    return [form for text in texts for value in (FIRST, SECOND) for form in forms(value) if form in text]


async def life_of_a_secret(world: SecretsWorld) -> None:
    """One life of a function with a secret."""
    await world.rotate(FIRST)
    books = Books()
    secretive, curious = package("secretive"), package("curious")
    assert not leaks(*secretive.files.values(), repr(secretive).encode(), secretive.version.encode())

    async def score(offload: Offload, name: str = "secretive", **metadata: Any) -> Outcome:
        outcomes.append(await offload.submit(name, item(str(len(outcomes)), **metadata), LIMIT_S))
        return outcomes[-1]

    def has(outcome: Outcome, value: str) -> bool:
        assert isinstance(outcome, Scored), outcome
        return (outcome.metrics["loaded"], outcome.metrics["called"]) == (digest(value), digest(value))

    outcomes: list[Outcome] = []
    async with world.open([secretive, curious], books) as backend, Offload([secretive, curious], backend) as offload:
        first = await score(offload)
        assert has(first, FIRST)
        assert isinstance(first, Scored)
        assert first.metrics["model"] == digest("m-1")
        assert has(await score(offload, do="print", children=world.children), FIRST)
        failed = await score(offload, do="raise")
        assert isinstance(failed, InfraFault)
        assert "[secret JUDGE_KEY]" in failed.detail
        for pid in descendants() if world.shared else ():
            for part in ("environ", "cmdline"):
                with contextlib.suppress(OSError):
                    assert not leaks(pathlib.Path(f"/proc/{pid}/{part}").read_bytes()), (pid, part)
        nothing = await score(offload, "curious", wanted=FIRST[::-1])
        assert isinstance(nothing, Scored)
        assert nothing.metrics == {"own": 0.0, "model": 0.0}
        assert nothing.value == 0.0 or not world.shared
        await world.rotate(SECOND)
        await world.renewed(offload)
        assert has(await score(offload), SECOND)
    shown = b"".join(world.shown())
    written = {path: path.read_bytes() for path in world.root.rglob("*") if path.is_file()}
    assert not leaks(*written.values()), [path for path, data in written.items() if leaks(data)]
    assert not leaks(shown, repr(outcomes).encode(), repr(books.invocations).encode(), repr(books.spans).encode())
    assert b"[secret JUDGE_KEY]" in b"".join([shown, *written.values()])
