"""Nothing that a Modal container sends is ever unpickled: real containers that answer with pickles that act."""

from __future__ import annotations

import asyncio
import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from serverless.deploy.modal_app import ModalDeployer
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed
from serverless.providers import modal_client
from serverless.providers.modal import ModalBackend
from serverless.providers.modal_client import ModalSettings
from serverless.spec import FunctionSpec
from serverless.types import FaultKind
from serverless.wire import encode
from tests.serverless.modal_plane.provider import MISSING, PlaneProcess, running_plane
from tests.serverless.support import item

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

FUNCTIONS = pathlib.Path(__file__).parents[1] / "modal_plane" / "functions"


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with running_plane() as one:
        yield one


def hostile() -> Package:
    spec = FunctionSpec(name="hostile", source="hostile.py", handler="hostile", takes="items", timeout_s=10)
    return build(spec, base=FUNCTIONS)


@pytest.mark.parametrize("how", ["answer", "exception"])
def test_a_pickle_from_a_container_is_refused_unloaded(plane: PlaneProcess, tmp_path: pathlib.Path, how: str) -> None:
    prefix = plane.prefix()
    undefended, defended = tmp_path / "undefended", tmp_path / "defended"

    async def bare_client() -> None:
        """The same call by Modal's unmodified client: the attack must work there for the test to be meaningful."""
        import modal

        client = await modal.Client.from_credentials.aio(os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"])
        handle: Any = modal.Function.from_name(f"{prefix}hostile", "call", client=client)
        try:
            await handle.remote.aio(payload(undefended))
        except modal.exception.Error:
            pass
        finally:
            await client.close.aio()

    def payload(file: pathlib.Path) -> bytes:
        import json

        event = [encode(item(file=str(file), how=how))]
        asked = {"id": "1", "name": "hostile", "version": "", "memory_mb": 1, "timeout_s": 9, "event": event}
        return json.dumps(asked).encode()

    async def main() -> None:
        async with ModalDeployer(ModalSettings(prefix=prefix)) as deployer:
            await deployer.deploy(hostile())
        await bare_client()
        assert undefended.exists()
        async with ModalBackend(ModalSettings(prefix=prefix)) as backend:
            reply = await backend.invoke("hostile", [encode(item(file=str(defended), how=how))], deadline_s=20.0)
        assert reply.fault is not None
        assert reply.body is None
        if how == "answer":
            assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.BAD_ANSWER, False)
            assert "pickle" in reply.fault.detail
        else:
            assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.CRASH, False)
        assert not defended.exists()

    asyncio.run(main())


def test_the_exception_of_a_failed_start_is_not_loaded_either(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    """The runtime itself pickles it, and it arrives with no format at all."""
    file = tmp_path / "made"
    source = tmp_path / "starts.py"
    source.write_text(
        "class Bomb(Exception):\n"
        "    def __reduce__(self):\n"
        f"        return open, ({str(file)!r}, 'w')\n\n"
        "raise Bomb('boo')\n\n"
        "def starts(items):\n    return []\n"
    )

    async def main() -> None:
        async with ModalDeployer(ModalSettings(prefix=plane.prefix())) as deployer:
            one = build(FunctionSpec(name="starts", source="starts.py", handler="starts", takes="items"), base=tmp_path)
            with pytest.raises(BackendFailed, match=r"did not load: .*Bomb: boo"):
                await deployer.deploy(one)

    asyncio.run(main())
    assert not file.exists()


def test_the_guard_is_there_while_a_client_is_open_and_leaves_nothing(plane: PlaneProcess) -> None:
    from modal import _serialization

    before = dict(os.environ), _serialization.Unpickler
    harmless = pickle.dumps({"a": 1})

    async def main() -> None:
        async with modal_client.open_client():
            async with modal_client.open_client():
                pass
            with pytest.raises(_serialization.DeserializationError):
                _serialization.deserialize(harmless, None)
            assert os.environ["MODAL_PAYLOAD_FORMAT"] == "cbor"

    asyncio.run(main())
    assert (dict(os.environ), _serialization.Unpickler) == before
    assert _serialization.deserialize(harmless, None) == {"a": 1}


def test_a_client_that_would_load_a_pickle_is_not_opened(plane: PlaneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from modal import _serialization

    monkeypatch.setattr(_serialization, "deserialize", lambda data, client: pickle.loads(data))

    async def main() -> None:
        async with ModalBackend():
            pass

    before = dict(os.environ)
    with pytest.raises(BackendFailed, match=r"cannot be kept from loading pickles.*modal~=1\.6\.4"):
        asyncio.run(main())
    assert dict(os.environ) == before
