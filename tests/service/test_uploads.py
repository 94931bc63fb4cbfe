"""Uploads of weights: complete or not at all, from any client with the token."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollart.adapters.service.bridge import external_trainer_token
from rollart.adapters.service.uploads import StoredFile, WeightUploads
from rollart.errors import UsageError
from rollart.launch.servers import serve_service
from rollart.service import Service, ServiceError

TOKEN = "a token"
TASKS = {"train": ["x"]}


@contextlib.contextmanager
def serving(data: Path | None, token: str = TOKEN) -> Iterator[str]:
    """A service on a separate loop, in this process."""
    at: list[str] = []
    up, over = threading.Event(), threading.Event()

    async def main() -> None:
        async with serve_service(host="127.0.0.1", port=0, token=token, data=data) as url:
            at.append(url)
            up.set()
            await asyncio.to_thread(over.wait, 120)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert up.wait(60)
        yield at[0]
    finally:
        over.set()
        thread.join(60)


def refusal(url: str, path: str, body: Any) -> tuple[int, str]:
    """Status and reason of a refused POST."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {TOKEN}"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as answer:
        return answer.code, json.loads(answer.read())["error"]


def version(path: Path, words: bytes = b"weights") -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(words * 20_000)
    (path / "training_args.bin").write_bytes(b"is not sent")
    return path


def test_a_version_goes_over_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as url:
        service = Service(url, token=TOKEN)
        service.init(["x"], TASKS)
        for number in (1, 2, 3):
            service.upload_weights(number, version(tmp_path / f"mine-{number}", b"v%d" % number))
        service.upload_weights(3, tmp_path / "mine-3")  # the answer was lost
        assert service.download_weights(tmp_path / "theirs") == 3
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "mine-3" / name).read_bytes()
        assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["config.json", "model.safetensors"]
        held = sorted(p.name for p in (tmp_path / "data" / "weights").iterdir())
        assert held == ["v000002", "v000002.sums", "v000003", "v000003.sums"], "the last two are kept"
        (tmp_path / "mine-3" / "model.safetensors").write_bytes(b"another")
        with pytest.raises(ServiceError, match="another v3 is announced already"):
            service.upload_weights(3, tmp_path / "mine-3")
        with pytest.raises(ServiceError, match="version 2 after 3"):
            service.upload_weights(2, tmp_path / "mine-2")
        with pytest.raises(ServiceError, match="token is not this service's"):
            Service(url).upload_weights(4, tmp_path / "mine-3")
        service.weight_sync_notify(4, str(tmp_path))
        with pytest.raises(ServiceError, match="not here to be read"):
            service.download_weights(tmp_path / "elsewhere")
    with serving(tmp_path / "data") as url:
        assert Service(url, token=TOKEN).weights()[0] == 4


def test_what_did_not_arrive_is_no_version(tmp_path: Path) -> None:
    async def some(*chunks: bytes, fails: bool = False) -> Any:
        for chunk in chunks:
            yield chunk
        if fails:
            raise aiohttp.ClientPayloadError("cut off")

    with serving(tmp_path / "data") as url:
        service = Service(url, token=TOKEN)
        service.init(["x"], TASKS)
        host, _, port = url.removeprefix("http://").rpartition(":")
        torn = http.client.HTTPConnection(host, int(port), timeout=60)
        torn.putrequest("PUT", "/v1/weights/1/files/model.safetensors")
        torn.putheader("Authorization", f"Bearer {TOKEN}")
        torn.putheader("Content-Length", "1000000")
        torn.endheaders(b"half")
        torn.close()
        told = {"config.json": {"bytes": 2, "sha256": "0"}, "model.safetensors": {"bytes": 4, "sha256": "0"}}
        assert "of v1 did not arrive" in refusal(url, "/v1/weights", {"version": 1, "files": told})[1]
        assert service.weights()[0] == 0

    async def main() -> None:
        uploads = WeightUploads(tmp_path / "other")
        config = await uploads.receive(1, "config.json", some(b"{}"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await uploads.receive(1, "model.safetensors", some(b"half", fails=True))
        assert [p.name for p in (tmp_path / "other" / "part-000001").iterdir()] == ["config.json"]
        weights = await uploads.receive(1, "model.safetensors", some(b"all", b" of it"))
        for wrong in (StoredFile(10, weights.sha256), StoredFile(9, "0" * 64)):
            with pytest.raises(Exception, match=r"arrived as 9 bytes"):
                await uploads.commit(1, {"config.json": config, "model.safetensors": wrong})
        with pytest.raises(Exception, match="needs config"):
            await uploads.commit(1, {"config.json": config})
        for name in ("../x.json", "a/b.json", ".hidden.json", "model.bin"):
            with pytest.raises(Exception, match="is no file of a version"):
                await uploads.receive(1, name, some(b""))
        path = await uploads.commit(1, {"config.json": config, "model.safetensors": weights})
        assert (path / "model.safetensors").read_bytes() == b"all of it"

    asyncio.run(main())


async def _sent(uploads: WeightUploads, number: int, words: bytes = b"weights") -> dict[str, StoredFile]:
    async def chunks() -> Any:
        yield words

    return {name: await uploads.receive(number, name, chunks()) for name in ("config.json", "model.safetensors")}


def test_what_a_kill_cut_off_is_in_nobodys_way(tmp_path: Path) -> None:
    left = tmp_path / "part-000001"
    left.mkdir()
    for name in ("config.json.0.part", "model.safetensors.1.part", "model.safetensors"):
        (left / name).write_bytes(b"half")

    async def main() -> None:
        uploads = WeightUploads(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert (await uploads.commit(1, await _sent(uploads, 1))).is_dir()

    asyncio.run(main())


def test_a_run_that_went_back_uploads_the_same_version_again(tmp_path: Path) -> None:
    async def main() -> None:
        uploads = WeightUploads(tmp_path)
        for number in (8, 9, 10):
            await uploads.commit(number, await _sent(uploads, number))
        path = await uploads.commit(9, await _sent(uploads, 9, b"others"))
        assert await uploads.listed(str(path), 9) == (await _sent(uploads, 9, b"others"))
        path = await uploads.commit(8, await _sent(uploads, 8, b"yet others"))
        assert (path / "model.safetensors").read_bytes() == b"yet others"
        assert sorted(p.name for p in tmp_path.glob("v*")) == ["v000008", "v000008.sums"]
        for number in (1_700_000_000, 1_700_000_001, 1_700_000_002):  # seconds, say
            await uploads.commit(number, await _sent(uploads, number))
        assert sorted(p.name for p in tmp_path.glob("v*[0-9]")) == ["v1700000001", "v1700000002"]

    asyncio.run(main())


def test_a_version_that_is_announced_twice_at_once_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    original = WeightUploads.make

    def make(self: WeightUploads, version: int, files: Any) -> None:
        made.append(tmp_path / f"v{version:06d}")
        original(self, version, files)

    monkeypatch.setattr(WeightUploads, "make", make)

    async def main() -> None:
        uploads = WeightUploads(tmp_path)
        files = await _sent(uploads, 1)
        assert set(await asyncio.gather(*(uploads.commit(1, files) for _ in range(3)))) == set(made)
        assert len(made) == 1
        assert (made[0] / "model.safetensors").is_file()

    asyncio.run(main())


def test_a_directory_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    latest = version(tmp_path / "latest")

    async def main() -> None:
        uploads = WeightUploads(tmp_path / "own", readable=(tmp_path,))
        assert (await uploads.listed(str(latest), 1))["model.safetensors"].bytes > 12
        (latest / "model.safetensors").write_bytes(b"of version 2")
        assert (await uploads.listed(str(latest), 2))["model.safetensors"].bytes == 12

    asyncio.run(main())


def test_a_version_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as url:
        service = Service(url, token=TOKEN)
        service.init(["x"], TASKS)
        for number in ("9" * 5000, str(2**63)):
            status, reason = refusal(url, f"/v1/weights/{number}/begin", {})
            assert (status, "a whole number" in reason) == (400, True)


@pytest.mark.slow  # it waits in real time
def test_a_client_waits_for_a_service_that_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as url:
        Service(url, token=TOKEN).init(["x"], TASKS)
    with pytest.raises(ServiceError, match="does not answer") as gone:
        Service(url, token=TOKEN).weights()
    assert gone.value.status == 0
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(Service(url, token=TOKEN, patience_s=100).weights()))
    waiting.start()
    port, again = int(url.rpartition(":")[2]), threading.Event()

    async def main() -> None:
        async with serve_service(host="127.0.0.1", port=port, token=TOKEN, data=tmp_path / "data"):
            await asyncio.to_thread(again.wait, 60)

    serving_again = threading.Thread(target=lambda: asyncio.run(main()))
    serving_again.start()
    waiting.join(60)
    again.set()
    serving_again.join(60)
    assert found == [(0, "")]


def test_the_token_is_one_that_nobody_else_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.token"
    made = external_trainer_token("", file)
    assert len(made) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert external_trainer_token("", file) == made, "another life has the same"
    file.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        external_trainer_token("", file)
    monkeypatch.setenv("MINE", "x")
    assert (external_trainer_token("MINE", None), external_trainer_token("", None)) == ("x", "")
    monkeypatch.delenv("MINE")
    with pytest.raises(UsageError, match="MINE is empty"):
        external_trainer_token("MINE", None)


def test_numbers_of_json_are_not_needed_to_read_a_note(tmp_path: Path) -> None:
    from rollart.cli.status import external_trainer_status

    assert external_trainer_status(tmp_path) is None
    (tmp_path / "service.json").write_text(json.dumps({"listen": "h:1", "state": "no batch on offer", "since": "now"}))
    assert external_trainer_status(tmp_path) == "h:1: no batch on offer since now"
