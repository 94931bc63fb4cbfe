"""Broadcasts over gloo: versions arrive unchanged and complete or not at all, and lost members delay no other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart import collective
from rollart.collective import BroadcastOrder, ReceivedWeights, WeightReceiver
from rollart.engine.weights import read_tensors
from rollart.model import BroadcastResult
from rollart.train import checkpoint, sending
from rollart.train.learner import Learner
from rollart.train.sending import BroadcastSender, OutgoingVersion, outgoing_version
from tests.train.trainkit import config, publish_version

CPU = torch.device("cpu")
BUCKET = 4096


def tensors(seed: int) -> dict[str, Tensor]:
    """Of several types: larger than a bucket, smaller than an aligned slot, an empty one and a scalar."""
    make = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=make),
        "b": torch.randn(100, 77, generator=make).to(torch.bfloat16),
        "c": torch.tensor(float(seed), dtype=torch.float64),
        "d": torch.zeros(0, 4),
        "e": torch.randn(3000, generator=make).to(torch.float16)[::2],
    }


class Bench:
    """Ranks of a trainer and workers of engines, all in this process."""

    def __init__(self, workers: int, ranks: int = 1) -> None:
        self.senders = [BroadcastSender(CPU, rank=rank, host="127.0.0.1") for rank in range(ranks)]
        self.receivers = [WeightReceiver(CPU) for _ in range(workers)]

    def order(self, stamp: str, *, group: str = "g", version: int = 1, size: int | None = None) -> BroadcastOrder:
        address, size = self.senders[0].address(), 1 + len(self.receivers) if size is None else size
        return BroadcastOrder(address, group, "gloo", size, len(self.senders), stamp, version, limit_s=60.0)

    def send(self, order: BroadcastOrder, *shares: dict[str, Tensor], config: str = "{}") -> list[BroadcastResult]:
        for number, receiver in enumerate(self.receivers, start=1):
            receiver.take_part(dataclasses.replace(order, first=number))
        return self.root(order, *shares, config=config)

    def root(self, order: BroadcastOrder, *shares: dict[str, Tensor], config: str = "{}") -> list[BroadcastResult]:
        sent: list[BroadcastResult | None] = [None] * len(self.senders)

        def one(rank: int) -> None:
            sent[rank] = self.senders[rank].send(order, OutgoingVersion(shares[rank], config), bucket=BUCKET)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.senders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [one for one in sent if one is not None]

    def close(self) -> None:
        for sender in self.senders:
            sender.leave(wait_s=60.0)
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(workers: int, ranks: int = 1) -> Bench:
        made.append(Bench(workers, ranks))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(received: ReceivedWeights | None, sent: dict[str, Tensor]) -> bool:
    assert received is not None
    assert received.tensors.keys() == sent.keys()
    return all(t.dtype == sent[n].dtype and torch.equal(t, sent[n]) for n, t in received.tensors.items())


def test_every_worker_has_what_every_rank_sent(bench: Callable[..., Bench]) -> None:
    """One lane per rank, also for a rank with nothing to send. The groups serve the next version as well."""
    b = bench(workers=2, ranks=3)
    for version in (1, 2):
        shares = tensors(version), {"z": torch.full((50, 50), float(version))}, dict[str, Tensor]()
        zero, one, two = b.send(b.order(f"s{version}"), *shares, config=f"config {version}")
        assert (zero.errors, one.errors, two.errors, two.bytes) == ({}, {}, {}, 0)
        assert {member: count for member, (count, _) in zero.has.items()} == dict.fromkeys(
            (1, 2), zero.bytes + one.bytes
        )
        for receiver in b.receivers:
            assert receiver.take("another") is None
            received = receiver.take(f"s{version}")
            assert received is not None
            assert received.config == f"config {version}"
            assert same(received, shares[0] | shares[1])
            assert receiver.take(f"s{version}") is None, "it was given out"


def test_a_head_that_is_tied_is_sent_once_as_it_is_in_files(tmp_path: Path) -> None:
    learner = Learner(config(tmp_path))
    sent = outgoing_version(checkpoint.take_snapshot(learner))
    path = publish_version(learner, tmp_path, 1, ())
    files = read_tensors(path)
    assert sent.tensors.keys() == files.keys()
    assert "lm_head.weight" not in files
    assert all(torch.equal(sent.tensors[name], tensor) for name, tensor in files.items())
    assert sent.config == (path / "config.json").read_text()


def test_a_damaged_bucket_is_said_and_nothing_of_the_version_is_kept(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(workers=1)
    (sent,) = b.send(b.order("s1"), tensors(1))
    assert sent.errors == {}
    monkeypatch.setattr(sending, "digest_of", lambda bucket: collective.digest_of(bucket)[::-1])
    (sent,) = b.send(b.order("s2", version=2), tensors(2))
    assert sent.errors == {1: "bucket 0 is damaged: its sha256 is not the one that was sent"}
    assert b.receivers[0].take("s2") is None
    assert same(b.receivers[0].take("s1"), tensors(1)), "the version before is there until another one is, whole"


def test_what_a_worker_cannot_load_it_does_not_keep(bench: Callable[..., Bench]) -> None:
    def refuse(received: ReceivedWeights) -> None:
        raise ValueError(f"another model: {received.config}")

    b = bench(workers=1)
    b.receivers = [WeightReceiver(CPU, check=refuse)]
    (sent,) = b.send(b.order("s1"), tensors(1), config="small")
    assert sent.errors == {1: "another model: small"}
    assert b.receivers[0].take("s1") is None


def test_nccl_without_a_gpu_is_refused_in_one_line(bench: Callable[..., Bench]) -> None:
    b = bench(workers=1)
    order = dataclasses.replace(b.order("s1"), backend="nccl")
    with pytest.raises(ValueError, match=r"^weights\.collective\.backend is nccl, and this engine has no GPU"):
        b.receivers[0].take_part(order)
    (sent,) = b.root(order, tensors(1))
    assert sent.errors[0] == "weights.collective.backend is nccl, and the trainer has no GPU (rule: gloo)"


@pytest.mark.parametrize("before", [None, "1"])
def test_a_group_that_cannot_be_made_leaves_the_process_its_settings(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(collective.NCCL_ERRORS, raising=False)
    if before is not None:
        monkeypatch.setenv(collective.NCCL_ERRORS, before)
    with contextlib.suppress(RuntimeError), collective.without_nccl_error_handling():
        assert os.environ[collective.NCCL_ERRORS] == "0"
        raise RuntimeError("no GPU")
    assert os.environ.get(collective.NCCL_ERRORS) == before


def test_the_store_keeps_nothing_of_the_broadcasts_before_the_last(bench: Callable[..., Bench]) -> None:
    b = bench(workers=1)
    keys = []
    for version in range(4):
        b.send(b.order(f"s{version}", version=version), tensors(version))
        served = b.senders[0].listening_store
        assert served is not None
        keys.append(served.num_keys())
    assert keys[1] == keys[2] == keys[3]


MEMBER = """
import dataclasses, json, os, signal, sys, torch
from rollart import collective
order = collective.BroadcastOrder(**json.loads(sys.argv[1]))
receiver = collective.WeightReceiver(torch.device("cpu"))
finish, seen = collective.BroadcastGroup.finish, []
def end(self, work, *, within_s):
    finish(self, work, within_s=within_s)
    seen.append(1)
    if len(seen) == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
collective.BroadcastGroup.finish = end
receiver.take_part(order)
print("ready", flush=True)
signal.pause()
"""
"""A worker that dies or hangs between two buckets."""


@contextlib.contextmanager
def member(order: BroadcastOrder, end: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MEMBER, json.dumps(dataclasses.asdict(order)), end]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.slow  # a process that loads torch, and 1 s of patience with a hung one
@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_a_worker_lost_between_two_buckets_holds_nobody_up(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Neither the trainer nor the other worker, which keeps the previous version; the next broadcast is among the
    remaining members."""
    b = bench(workers=1)
    b.send(b.order("s1"), tensors(1))
    large = {"large": torch.zeros(64 * 2**20, dtype=torch.uint8)}  # more than sockets hold
    order = b.order("s2", group="with the mortal", version=2, size=3)
    with member(dataclasses.replace(order, first=2), end) as process:
        b.receivers[0].take_part(order)
        with monkeypatch.context() as patience:
            patience.setattr(collective, "STALL_S", 1.0)
            sent = b.senders[0].send(order, OutgoingVersion(large, "{}"), bucket=8 * 2**20)
        assert 0 in sent.errors
        assert 2 in sent.errors
        if end == "SIGKILL":
            assert process.wait(60) == -signal.SIGKILL
        assert b.receivers[0].take("s2") is None
        assert same(b.receivers[0].take("s1"), tensors(1))
        (sent,) = b.send(b.order("s3", group="without it", version=3), tensors(3))
        assert sent.errors == {}
        assert same(b.receivers[0].take("s3"), tensors(3))
