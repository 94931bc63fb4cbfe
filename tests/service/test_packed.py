"""Columns of numbers as bytes: the same numbers in fewer bytes, for clients with and without support for it."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import urllib.request
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.service import packed
from rollart.adapters.service.packed import LEAST, PackedColumn, columns, decoded, encoded, pack, plain
from rollart.adapters.service.state import ExperienceRequest, ServiceSetup, ServiceState, ServiceTask
from rollart.adapters.service.storage import SegmentLocation, ServiceStore
from rollart.service import Service
from tests.service import put
from tests.service.test_uploads import TOKEN, serving

ROOT = Path(__file__).parents[2]

numbers = (
    st.lists(st.integers(), min_size=LEAST, max_size=60)
    | st.lists(st.integers(-128, 127), min_size=LEAST, max_size=60)
    | st.lists(st.floats(), min_size=LEAST, max_size=60)
    | st.lists(st.floats(width=32), min_size=LEAST, max_size=60)
    | st.lists(st.integers() | st.floats() | st.booleans(), max_size=60)
)


def same(one: Any, other: Any) -> bool:
    """Equality that includes type and sign, and covers values that are no numbers."""
    return len(one) == len(other) and all(
        type(a) is type(b) and (repr(a) == repr(b)) for a, b in zip(one, other, strict=True)
    )


@settings(max_examples=31, deadline=None)
@given(values=st.lists(numbers, max_size=4), words=st.text(max_size=5))
def test_what_was_packed_is_the_same_again(values: list[list[Any]], words: str) -> None:
    row: dict[str, Any] = {"columns": {"words": words, **{f"c{i}": pack(v) for i, v in enumerate(values)}}}
    head, blob = decoded(encoded({"rows": [row]}, [row]))
    found = columns(head["rows"][0], blob)
    assert found.pop("words") == words
    for value, back in ((value, found[f"c{i}"]) for i, value in enumerate(values)):
        assert same(plain(back), value)
        if len(value) >= LEAST and set(map(type, value)) == {float}:
            assert isinstance(back, PackedColumn), "floats always are"


@pytest.mark.parametrize(
    ("values", "code", "size"),
    [
        ([0, 1] * 20, "b", 1),
        ([-(2**15)] * 40, "h", 2),
        ([150_000] * 40, "i", 4),
        ([2**31] * 40, "q", 8),
        ([-0.5] * 40, "f", 4),
        ([0.1] * 40, "d", 8),
        ([math.nan] * 40, "f", 4),
        ([1e300] * 40, "d", 8),
    ],
)
def test_it_takes_as_few_bytes_as_hold_it(values: list[Any], code: str, size: int) -> None:
    found = pack(values)
    assert (found.code, len(found.data)) == (code, 40 * size)
    assert pack(array("d", [0.1] * 40)) == PackedColumn("d", array("d", [0.1] * 40).tobytes())


@pytest.mark.parametrize("told", [["x", 0, 8], ["q", 0, 9], ["q", 8, 0], ["q", -8, 0], ["q", 0, 80], "q", ["q", 0, 4]])
def test_what_is_no_column_is_refused(told: Any) -> None:
    with pytest.raises(ValueError, match="column x"):
        columns({"packed": {"x": told}}, bytes(16))


def test_large_values_are_on_the_disk_alone(tmp_path: Path) -> None:
    async def main() -> None:
        tasks = {"train": ServiceTask(("ids", "words"))}
        store = ServiceStore(tmp_path)
        desk = ServiceState(ServiceSetup(("ids", "words"), tasks), store)
        await desk.begin()
        ids, words = list(range(50_000)), "w" * 70_000
        (row,) = await desk.put_prompts([{"ids": ids}], 1)
        assert await put(desk, row, {"words": words}, None)
        assert all(isinstance(v, SegmentLocation) for v in desk.rows[row].values.values())
        assert await put(desk, row, {"words": words}, None), "said again"
        for _ in range(2):
            lease, ((given_,),) = await desk.lease_rows(ExperienceRequest("train", 1), 0.0, lease_s=60.0)
            assert (plain(given_.values["ids"]), given_.values["words"]) == (ids, words)
            await desk.return_lease(lease)
            store.close()
            store = ServiceStore(tmp_path)
            found = ServiceState.recovered(store)
            assert found is not None
            desk = found
        store.close()

    asyncio.run(main())


def test_a_client_that_knows_json_alone_sees_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_packed: list[Any] = []
    monkeypatch.setattr(packed, "encoded", lambda *body: sent_packed.append(body) or encoded(*body))
    ids, logprobs = list(range(1000, 1100)), [-0.1] * 100
    with serving(tmp_path / "data", token="") as url:
        packs, plainly = Service(url), Service(url, arrays=True)
        packs.init(["ids", "logprobs", "x"], {"a": ["ids"], "b": ["logprobs"], "c": ["x"]})
        body = {"prompts": [{"ids": ids}]}
        sent = urllib.request.Request(f"{url}/v1/prompts", json.dumps(body).encode(), {"Content-Type": "text/json"})
        with urllib.request.urlopen(sent, timeout=60) as answer:
            (row,) = json.loads(answer.read())["ids"]
        assert sent_packed == []
        assert packs.put_experience(row, logprobs=array("d", logprobs), x=[1, 2])
        assert len(sent_packed) == 1, "the service said that it takes them"
        take = urllib.request.Request(f"{url}/v1/experience/take", b'{"task": "b"}')
        with urllib.request.urlopen(take, timeout=60) as answer:
            assert json.loads(answer.read())["batches"][0][0]["columns"] == {"logprobs": logprobs}
        (given_,) = packs.get_experience("a", 1)
        assert given_["ids"] == ids
        (given_,) = plainly.get_experience("c", 1, columns=["ids", "x"])
        assert (given_["ids"], given_["x"]) == (array("h", ids), [1, 2])


@pytest.mark.slow  # an interpreter
def test_the_client_may_be_copied_alone(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_bytes((ROOT / "rollart" / "service.py").read_bytes())
    program = """if True:
        import sys
        from service import Service
        service = Service(sys.argv[1], token=sys.argv[2])
        service.init(["x"], {"train": ["x"]})
        service.put_prompts([{"x": list(range(100))}])
        (row,) = service.get_experience("train", 1)
        assert row["x"] == list(range(100)), row
    """
    with serving(tmp_path / "data") as url:
        command = [sys.executable, "-S", "-c", program, url, TOKEN]
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
