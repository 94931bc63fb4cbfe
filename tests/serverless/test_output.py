"""The prefix of the lines that a function prints, and its reader."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless import output
from serverless.deploy.handler import adapt
from serverless.output import LineReader, current
from serverless.providers.base import LogLine
from serverless.types import Item
from serverless.workers import logs
from serverless.workers._worker import end_line


@contextlib.contextmanager
def worker(run: str = "lake-1") -> Iterator[io.StringIO]:
    """The standard output of this process as that of a worker of a run."""
    stream = io.StringIO()
    kept = sys.stdout, sys.stderr
    sys.stdout = stream
    os.environ[output.RUN] = run
    try:
        output.attribute()
        yield stream
    finally:
        current.end()
        sys.stdout, sys.stderr = kept
        del os.environ[output.RUN]


def call(target: Any, *keys: str, run: str = "") -> None:
    event = [{"id": key, "messages": []} for key in keys]
    client = SimpleNamespace(custom={"run": run}) if run else None
    handler = adapt(target)
    current.begin(event, SimpleNamespace(aws_request_id="q-1", client_context=client))
    try:
        handler(event, None)
    finally:
        current.end()


def lines(text: str) -> list[tuple[str, tuple[str, ...], str]]:
    reader = LineReader()
    return [line for line in map(reader.read, text.splitlines()) if line is not None]


def single(sample: Item) -> float:
    print("scoring", sample.id)
    print("a\nb")
    return 1.0


def test_a_line_belongs_to_the_item_that_is_scored() -> None:
    with worker() as printed:
        print("before a call")
        call(single, "t/0", "t/1")
        print("after a call")
    assert lines(printed.getvalue()) == [
        ("", (), "before a call"),
        *[("lake-1", (key,), text) for key in ("t/0", "t/1") for text in (f"scoring {key}", "a", "b")],
        ("", (), "after a call"),
    ]


def test_a_line_of_a_call_of_several_items_belongs_to_all_of_them() -> None:
    def batch(prompts: list[str], completions: list[str]) -> list[float]:
        print("one")
        print("two")
        return [1.0] * len(completions)

    with worker() as printed:
        call(batch, "t/0", "t/1")
        call(batch, "t 2")
    assert lines(printed.getvalue()) == [
        ("lake-1", ("t/0", "t/1"), "one"),
        ("lake-1", ("t/0", "t/1"), "two"),
        ("lake-1", ("t 2",), "one"),
        ("lake-1", ("t 2",), "two"),
    ]
    assert printed.getvalue().count("t/0") == 1, "the items are named once a call"


def test_concurrent_items_have_their_own_lines() -> None:
    async def score(sample: Item) -> float:
        await asyncio.sleep(0.0)
        print(sample.id)
        return 1.0

    with worker() as printed:
        call(score, "t/0", "t/1", run="other")
    assert lines(printed.getvalue()) == [("other", ("t/0",), "t/0"), ("other", ("t/1",), "t/1")]


def test_a_call_that_prints_nothing_writes_nothing() -> None:
    with worker() as printed:
        call(lambda sample: 1.0, "t/0")
    assert printed.getvalue() == ""


def test_records_of_logging_on_lambda_have_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lambda's runtime client writes them to a descriptor of the platform."""
    reading, writing = os.pipe()

    class Handler(logging.Handler):
        log_sink = SimpleNamespace(fd=writing)

        def emit(self, record: logging.LogRecord) -> None:
            os.write(self.log_sink.fd, f"[INFO]\t{record.getMessage()}\n".encode())

    handler = Handler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])

    def score(sample: Item) -> float:
        logging.getLogger().error("no %s", "answer")
        return 0.0

    with worker():
        call(score, "t/0")
    os.close(writing)
    with os.fdopen(reading) as sink:
        assert lines(sink.read()) == [("lake-1", ("t/0",), "[INFO]\tno answer")]


@given(run=st.text(max_size=20), items=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
def test_ids_of_any_characters_are_read_back(run: str, items: list[str]) -> None:
    with worker() as stream:
        context = SimpleNamespace(aws_request_id="q", client_context=SimpleNamespace(custom={"run": run}))
        current.begin([{"id": key} for key in items], context)
        print("text")
    assert lines(stream.getvalue()) == [(run, tuple(items), "text")]


def test_a_followed_log_is_read_once_across_its_rotation(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "0.log"

    def append(text: str) -> None:
        with path.open("ab") as log:
            log.write(f"[rollart run=r item={text}] {text}\n".encode() + end_line("q"))

    async def main() -> list[LogLine]:
        found: list[LogLine] = []
        append("old")
        async for line in logs.follow(tmp_path, since_s=60.0):
            found.append(line)
            if line.text == "old":
                append("new")
                path.rename(tmp_path / "0.log.1")
                append("rotated")
            elif line.text == "rotated":
                append("last")
            elif line.text == "last":
                break
        return found

    found = asyncio.run(main())
    assert [(line.text, line.run, line.items) for line in found] == [
        (text, "r", (text,)) for text in ("old", "new", "rotated", "last")
    ]
