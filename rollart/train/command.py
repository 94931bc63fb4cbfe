"""Outcomes of commands, and execution of rank 0's commands on all ranks."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import torch

from rollart.errors import RollartError, TrainerError, VersionDamaged
from rollart.train.batch import InvalidSamples
from rollart.train.ranks import RankChannel

CommandMessage: TypeAlias = dict[str, Any]
CommandHandler: TypeAlias = Callable[[CommandMessage], CommandMessage]


VERSION_DAMAGED_STATUS = 422
"""HTTP status of a restore from a version that is not as it was published."""

MEMORY_REMEDY = (
    "lower training.max_tokens_per_microbatch, set trainer.activation_checkpointing, or give the trainer more GPUs"
)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """HTTP status and msgpack body of a response. `sound`: every rank left its work at the same point, so the next
    command may follow; otherwise a rank may still wait for another."""

    status: int
    body: bytes
    error: str = ""
    remedy: str = ""
    sound: bool = True

    @classmethod
    def failed(
        cls, status: int, error: str, remedy: str = "", *, sound: bool = True, samples: tuple[str, ...] = ()
    ) -> CommandOutcome:
        line = error.splitlines()[0] if error else "unknown"
        return cls(status, msgpack.packb({"error": line, "remedy": remedy, "samples": samples}), line, remedy, sound)


def run_command(work: CommandHandler, body: bytes) -> CommandOutcome:
    """Unpack, run and pack a command in the worker thread; every exception becomes one line."""
    try:
        message = msgpack.unpackb(body)
        if not isinstance(message, dict):
            raise ValueError("the body is not a msgpack map")
        return CommandOutcome(200, msgpack.packb(work(message)))
    except VersionDamaged as error:
        return CommandOutcome.failed(VERSION_DAMAGED_STATUS, error.message, error.remedy)
    except RollartError as error:
        return CommandOutcome.failed(500, error.message, error.remedy)
    except KeyError as error:
        return CommandOutcome.failed(400, f"the request lacks {error}")
    except InvalidSamples as error:
        return CommandOutcome.failed(400, str(error), samples=error.samples)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        return CommandOutcome.failed(400, str(error) or type(error).__name__)
    except torch.OutOfMemoryError as error:
        print(f"rollart.train: {str(error).splitlines()[0]}", file=sys.stderr)
        return CommandOutcome.failed(500, f"no memory is left on the GPU: {error}", MEMORY_REMEDY, sound=False)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return CommandOutcome.failed(500, f"{type(error).__name__}: {error}", sound=False)


def run_on_all_ranks(channel: RankChannel, name: str, work: CommandHandler, body: bytes) -> CommandOutcome:
    """Run a command on every rank, in the channel's thread. The outcome of this rank, or the first failure of
    another."""
    try:
        channel.send_command(name, body)
        mine = run_command(work, body)
        if not mine.sound:
            return mine
        outcomes = channel.exchange((mine.status, mine.error, mine.remedy))
    except TrainerError as error:
        return CommandOutcome.failed(500, error.message, error.remedy, sound=False)
    if mine.status == 200:
        for rank, (status, line, remedy) in enumerate(outcomes):
            if status != 200:
                return CommandOutcome.failed(500, f"rank {rank}: {line}", remedy)
    return mine


def follow_rank_zero(
    channels: Mapping[RankChannel, Mapping[str, CommandHandler]], *, enter: Callable[[], None] = lambda: None
) -> None:
    """Execute rank 0's commands until it is gone; each channel has a thread, which starts with `enter`. Then ends the
    process. An unexpected error ends it at once as well: the other ranks wait for this one in the middle of a command,
    and notice its exit."""

    def listen(channel: RankChannel, works: Mapping[str, CommandHandler]) -> None:
        try:
            enter()
            while True:
                name, body = channel.receive_command()
                mine = run_command(works[name], body)
                if not mine.sound:
                    break
                channel.exchange((mine.status, mine.error, mine.remedy))
        except TrainerError:
            _end(0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        _end(1)

    threads = [threading.Thread(target=listen, args=pair, daemon=True) for pair in channels.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end(status: int) -> None:
    sys.stderr.flush()
    os._exit(status)
