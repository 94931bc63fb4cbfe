"""Attributes what a function prints to the run and the items of its call. Packed with every function.

In a worker, each line that Python code prints during a call has a prefix, in the form of this module's `parse`:

    [rollart run=R item=T] text                     a call of one item, or a reward that scores items one by one
    [rollart run=R call=Q items=T,U,V]              once per call of several items, before its first line
    [rollart run=R call=Q] text

Values are percent-encoded, and parts that are unknown are left out. A call that prints nothing writes nothing. The
output of child processes and of compiled code has no prefix.
"""

from __future__ import annotations

import contextvars
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

RUN = "ROLLART_RUN"
"""The variable with the run's id in workers that serve one run. Otherwise it is in the call's context, as
`client_context.custom["run"]` (Lambda's form)."""

_PREFIX = re.compile(r"\[rollart(?: run=(\S+?))?(?: call=(\S+?))?(?: items?=(\S+?))?\](?: |$)")

_CALLS = 4096
"""Calls of several items whose ids a reader remembers."""


class CurrentCall:
    """The call that this process serves; a worker serves one at a time. `item` is the item that is being scored, None
    if the items of the call are scored together."""

    __slots__ = ("announced", "context", "event", "item")

    def __init__(self) -> None:
        self.event: Iterable[Any] | None = None
        self.context: Any = None
        self.item: str | None = None
        self.announced = False

    def begin(self, event: Iterable[Any], context: Any) -> None:
        self.event, self.context, self.item, self.announced = event, context, None, False

    def end(self) -> None:
        self.event = self.context = None


current = CurrentCall()

concurrent_item: contextvars.ContextVar[str | None] = contextvars.ContextVar("concurrent_item", default=None)
"""The item that a task scores beside others."""


def attribute() -> None:
    """From now on, prefix the lines that this process prints during calls."""
    sys.stdout, sys.stderr = _AttributedStream(sys.stdout), _AttributedStream(sys.stderr)
    logging = sys.modules.get("logging")
    for handler in logging.getLogger().handlers if logging is not None else ():
        # On Lambda the records of `logging` go to a descriptor of the platform's, not to a stream.
        if hasattr(getattr(handler, "log_sink", None), "fd"):
            handler.addFilter(_attribute_record)


def parse(text: str) -> tuple[str, str, tuple[str, ...], str] | None:
    """The run, the call and the items of a line, with its text without the prefix; None for a line without a prefix.
    Unknown parts are empty."""
    found = _PREFIX.search(text)
    if found is None:
        return None
    from urllib.parse import unquote

    run, call, items = found.groups(default="")
    names = tuple(unquote(item) for item in items.split(",")) if items else ()
    return unquote(run), unquote(call), names, text[: found.start()] + text[found.end() :]


class LineReader:
    """Reads lines in their order, and completes those of a call of several items with these items."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()

    def read(self, text: str) -> tuple[str, tuple[str, ...], str] | None:
        """The run, the items and the text of a line; None for a line that only names the items of a call."""
        found = parse(text)
        if found is None:
            return "", (), text
        run, call, items, rest = found
        if not call:
            return run, items, rest
        if not items:
            return run, self._items.get((run, call), ()), rest
        self._items[run, call] = items
        if len(self._items) > _CALLS:
            self._items.popitem(last=False)
        return None


class _AttributedStream:
    """A text stream that begins each line with a prefix. All else is the stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._fresh = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if current.event is not None and text:
            prefix = _prefix()
            if prefix:
                head, last = (f"{_announcement()}{prefix}" if self._fresh else ""), text[-1]
                self._fresh = last == "\n"
                self._stream.write(head + text[:-1].replace("\n", f"\n{prefix}") + last)
                return len(text)
        self._fresh = text.endswith("\n") if text else self._fresh
        self._stream.write(text)  # AWS's own stream returns nothing
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _attribute_record(record: Any) -> bool:
    if current.event is not None and (prefix := _prefix()):
        record.msg, record.args = prefix + record.getMessage(), ()
    return True


def _prefix() -> str:
    items = _items()
    item = f" item={_quoted(items[0])}" if len(items) == 1 else ""
    call = f" call={_quoted(current.context.aws_request_id)}" if len(items) > 1 else ""
    run = _run()
    return f"[rollart{run}{call}{item}] " if run or call or item else ""


def _announcement() -> str:
    """The line with the items of a call of several, before its first line."""
    items = _items()
    if current.announced or len(items) < 2:
        return ""
    current.announced = True
    names = ",".join(map(_quoted, items))
    return f"[rollart{_run()} call={_quoted(current.context.aws_request_id)} items={names}]\n"


def _items() -> list[str]:
    item = concurrent_item.get() or current.item
    return [item] if item is not None else [str(one["id"]) for one in current.event or () if "id" in one]


def _run() -> str:
    custom = getattr(getattr(current.context, "client_context", None), "custom", None)
    run = custom.get("run") if isinstance(custom, dict) else os.environ.get(RUN)
    return f" run={_quoted(str(run))}" if run else ""


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="-._~:/#+@")
