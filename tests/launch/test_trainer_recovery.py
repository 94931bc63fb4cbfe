"""The trainer's supervision by the controller: a resume in which it dies, hangs or refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgpack
import pytest

from rollart.errors import PartDied, TrainerError, VersionDamaged
from rollart.launch.engines import TrainerProgram
from rollart.leases import Leases
from rollart.ledger.intervals import ResourceClock
from rollart.model import WeightsRef
from rollart.testing.ledger import MemoryRecorder

DAMAGED: bytes = msgpack.packb({"error": "v3 is damaged"})
UNREADABLE: bytes = msgpack.packb({"error": "v3 cannot be read: Input/output error"})

V3 = WeightsRef(3, "weights/v000003")

DIES, HANGS, REFUSES, RESTORES, NO_START, BLIND = "dies", "hangs", "refuses", "restores", "no start", "blind"
GARBLED = "garbled"

ANSWERS = {REFUSES: ("422 Damaged", DAMAGED), BLIND: ("500 Wrong", UNREADABLE), GARBLED: ("500 Wrong", b"\xc1garbage")}


class Programs:
    """One trainer per life, with a scripted reaction to a restore; a dead or hung one never answers again."""

    def __init__(self, *lives: str) -> None:
        self._lives = list(lives)
        self.servers: list[asyncio.Server] = []

    async def call(self, method: str, arguments: list[str]) -> str:
        life, gone = self._lives.pop(0), asyncio.Event()
        if life == NO_START:
            raise PartDied("trainer-0", "ended with status 1 before it was ready")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            route = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            status, body = "200 OK", json.dumps({"status": "ok"}).encode()
            if route == b"/restore":
                gone.set() if life in (DIES, HANGS) else None
                status, body = ANSWERS.get(life, ("200 OK", b"\x80"))
            if not gone.is_set():
                head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
            if life != HANGS or not gone.is_set():
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def resumed(*lives: str) -> list[int]:
    """The number of restarts during a resume at v3."""
    recorder = MemoryRecorder()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = ResourceClock(role="trainer", resource="trainer-0", recorder=recorder, clock=loop.time)
        programs = Programs(*lives)
        trainer = TrainerProgram(
            cast(Any, programs), Leases(recorder), recorder, clock, current=lambda: None, start_s=0.5
        )
        try:
            await trainer.start()
            await trainer.supervised(lambda: trainer.restore(V3))
        finally:
            await trainer.close()
            for server in programs.servers:
                server.close()

    asyncio.run(main())
    return [int(cast(Any, e.fields["restarts"])) for e in recorder.events if e.kind == "trainer_restarted"]


def test_a_trainer_that_dies_in_the_restore_of_a_resume_is_restarted() -> None:
    assert resumed(DIES, DIES, RESTORES) == [1, 2]
    assert resumed(DIES, NO_START, RESTORES) == [1, 2], "a start that fails is a try"


def test_a_trainer_that_cannot_be_restarted_says_why() -> None:
    async def main() -> None:
        recorder, loop = MemoryRecorder(), asyncio.get_running_loop()
        clock = ResourceClock(role="trainer", resource="trainer-0", recorder=recorder, clock=loop.time)
        programs = cast(Any, Programs(NO_START, NO_START, NO_START))
        trainer = TrainerProgram(programs, Leases(recorder), recorder, clock, current=lambda: None, start_s=0.5)
        await trainer.recover()

    with pytest.raises(TrainerError, match="the trainer died 4 times: ended with status 1 before it was ready"):
        asyncio.run(main())


@pytest.mark.slow  # a lease of 0.5 s
def test_a_trainer_that_hangs_in_the_restore_of_a_resume_is_restarted() -> None:
    assert resumed(HANGS, RESTORES) == [1]


def test_a_version_that_the_trainer_cannot_restore_is_no_death_of_it() -> None:
    with pytest.raises(VersionDamaged, match="v3 is damaged"):
        resumed(REFUSES)


def test_a_version_that_cannot_be_read_is_not_taken_for_damaged() -> None:
    """The version may be intact: a restarted trainer reads it, or the resume ends with the cause."""
    assert resumed(BLIND, RESTORES) == [1]
    with pytest.raises(TrainerError, match="Input/output error") as caught:
        resumed(BLIND, BLIND, BLIND)
    assert not isinstance(caught.value, VersionDamaged)


def test_an_answer_that_is_no_trainers_names_where_to_look() -> None:
    assert resumed(GARBLED, RESTORES) == [1]
    with pytest.raises(TrainerError, match="unreadable answer, status 500") as caught:
        resumed(GARBLED, GARBLED, GARBLED)
    assert "rollart logs" in caught.value.remedy
