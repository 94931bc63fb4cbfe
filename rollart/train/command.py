"""One command's outcome, and how ranks follow rank 0's commands."""

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

__all__ = ["CommandMessage", "CommandOutcome", "CommandHandler", "run_command", "follow_rank_zero", "run_on_all_ranks"]

CommandMessage: TypeAlias = dict[str, Any]
CommandHandler: TypeAlias = Callable[[CommandMessage], CommandMessage]


VERSION_DAMAGED_STATUS = 422
"""Status of the answer to a restore from a version that is not what was published."""

MEMORY_REMEDY = (
    "lower training.max_tokens_per_microbatch, set trainer.activation_checkpointing, or give the trainer more GPUs"
)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The HTTP status and the msgpack body of an answer. `sound`: every rank left its work at the same place, so the
    next command may come; otherwise one of them may still wait for another."""

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
    """Runs in the worker thread: unpack, work, pack; every exception becomes one line."""
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
    """Do a command on every rank; this rank's outcome, or the first failure of another. In the channel's thread."""
    try:
        channel.say(name, body)
        mine = run_command(work, body)
        if not mine.sound:
            return mine
        said = channel.exchange((mine.status, mine.error, mine.remedy))
    except TrainerError as error:
        return CommandOutcome.failed(500, error.message, error.remedy, sound=False)
    if mine.status == 200:
        for rank, (status, line, remedy) in enumerate(said):
            if status != 200:
                return CommandOutcome.failed(500, f"rank {rank}: {line}", remedy)
    return mine


def follow_rank_zero(
    channels: Mapping[RankChannel, Mapping[str, CommandHandler]], *, enter: Callable[[], None] = lambda: None
) -> None:
    """Do what rank 0 says until it is gone, each channel in a thread of its own that begins with `enter`; ends the
    process. What a rank does not expect ends it too, at once: the others wait for it in the middle of something, and
    see that it is gone."""

    def listen(channel: RankChannel, works: Mapping[str, CommandHandler]) -> None:
        try:
            enter()
            while True:
                name, body = channel.hear()
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
