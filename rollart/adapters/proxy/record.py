"""Captured sessions as JSON: one line per answered turn in a file, and trajectories on request."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollart.adapters.proxy.capture import CapturedTurn
from rollart.adapters.proxy.sessions import ProxySession
from rollart.errors import StorageFailed, UsageError
from rollart.model import Segment, SegmentKind

SCHEMA_VERSION = 1


class SessionRecorder:
    """Appends one line per answered request. The operating system has the line before the response is sent, so a
    killed proxy loses nothing that a harness has received."""

    def __init__(self, path: Path | None) -> None:
        """With None, nothing is written. UsageError if the file cannot be written."""
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file() and path.stat().st_size:
                    with path.open("rb+") as file:
                        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                            whole = text.rfind(b"\n") + 1
                        # The writer of a partial last line was killed or its disk was full: the response was not sent.
                        file.truncate(whole)
                self._file = path.open("a", buffering=1)
            except OSError as error:
                raise UsageError(f"cannot write {path}: {error.strerror}", remedy="choose another --record") from None

    def turn(self, session: ProxySession, turn: CapturedTurn) -> None:
        segments, answer = [segment_body(s) for s in turn.segments], turn.answer.for_template()
        self._write({"session": session.name, **_origin(turn), "segments": segments, "answer": answer})

    def ended(self, session: ProxySession) -> None:
        self._write(
            {"session": session.name, "ended": True, "reward": session.ending.reward, "success": session.ending.success}
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps({"schema_version": SCHEMA_VERSION, **line}) + "\n")
            except OSError as error:
                raise StorageFailed(f"cannot write {self._file.name}: {error.strerror}") from None


def session_body(session: ProxySession) -> dict[str, Any]:
    """A session as trajectories, one per branch: its segments, and the number of tokens shared with an earlier
    branch."""
    branches = [
        {
            "last": branch.last,
            "turns": [t.number for t in branch.turns],
            "shared_tokens": branch.shared,
            "sampled_tokens": branch.sampled,
            "segments": [segment_body(s) for s in branch.segments],
        }
        for branch in session.capture.branches()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "session": session.name,
        "reward": session.ending.reward,
        "success": session.ending.success,
        "abandoned": session.abandoned,
        "turns": [{**_origin(t), "answer": t.answer.for_template()} for t in session.capture.turns],
        "branches": branches,
    }


def segment_body(s: Segment) -> dict[str, Any]:
    shown: dict[str, Any] = {"kind": s.kind.value, "turn": s.turn, "token_ids": list(s.token_ids)}
    if s.kind is SegmentKind.ACTION:
        shown |= {"policy_version": s.policy_version, "logprobs": list(s.logprobs)}
    return shown


def read_sessions(path: Path) -> dict[str, list[tuple[Segment, ...]]]:
    """Trajectories by session, one per branch, from a recorded file. A partial last line is ignored.

    If two proxy processes recorded a session under the same name, both recordings are kept and turn numbers
    continue."""
    turns: dict[str, list[tuple[int | None, tuple[Segment, ...]]]] = {}
    begin: dict[str, int] = {}
    with path.open() as file:
        for line in (json.loads(text) for text in file if text.endswith("\n")):
            if "turn" not in line:
                continue
            held = turns.setdefault(line["session"], [])
            if line["turn"] == 0:
                begin[line["session"]] = len(held)
            after = None if line["after"] is None else line["after"] + begin[line["session"]]
            held.append((after, tuple(map(_segment, line["segments"]))))
    return {name: list(_branch_segments(held)) for name, held in turns.items()}


def _branch_segments(turns: list[tuple[int | None, tuple[Segment, ...]]]) -> Iterator[tuple[Segment, ...]]:
    followed = {after for after, _ in turns}
    for number in sorted(set(range(len(turns))) - followed):
        at: int | None = number
        path: tuple[Segment, ...] = ()
        while at is not None:
            at, segments = turns[at]
            path = segments + path
        yield path


def _origin(turn: CapturedTurn) -> dict[str, Any]:
    planned = turn.planned
    return {"turn": turn.number, "after": planned.after, "begun": planned.relation.value, "reason": planned.reason}


def _segment(value: dict[str, Any]) -> Segment:
    return Segment(
        SegmentKind(value["kind"]),
        value["turn"],
        tuple(value["token_ids"]),
        value.get("policy_version"),
        tuple(value.get("logprobs", ())),
    )
