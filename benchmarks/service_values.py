"""The cost of the service's values: bytes on the wire and in memory, and processor seconds, as JSON lists (understood
by every client) and in columnar encoding.

    python benchmarks/service_values.py [--rows 256] [--tokens 4096]

A service as a process, and a client here. Every row has token ids, a mask, log-probabilities and versions. Processor
time is that of client and service together, memory the growth of the service. Values above 64 KB are kept only on disk
if there is one: token ids from 16,384 tokens on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollart import service as module
from rollart.service import Service

COLUMNS = ["token_ids", "loss_mask", "logprobs", "versions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    chance = random.Random(0)
    rows = [row(chance, arguments.tokens) for _ in range(arguments.rows)]
    found: list[dict[str, Any]] = []
    for name, packs, disk in (("json", False, False), ("packed", True, False), ("packed, on disk", True, True)):
        with TemporaryDirectory() as directory:
            found.append({"values": name, **measured(rows, packs=packs, data=Path(directory) if disk else None)})
            print(json.dumps(found[-1]), flush=True)


def row(chance: random.Random, tokens: int) -> dict[str, list[Any]]:
    """As a run hands it over: log-probabilities are float32."""
    return {
        "token_ids": [chance.randrange(150_000) for _ in range(tokens)],
        "loss_mask": [int(i > tokens // 4) for i in range(tokens)],
        "logprobs": array("f", [-chance.random() for _ in range(tokens)]).tolist(),
        "versions": [17] * tokens,
    }


def measured(rows: list[dict[str, list[Any]]], *, packs: bool, data: Path | None) -> dict[str, float]:
    packing, sent = module.packing, [0]
    if not packs:
        module.packing = None  # type: ignore[assignment]  # as where the client was copied alone
    try:
        with running(data) as (url, pid):
            client = Service(url)
            client.init(COLUMNS, {"train": COLUMNS}, capacity=len(rows))
            answer = client._answer
            client._answer = lambda *a: (sent.__setitem__(0, sent[0] + len(a[2] or b"")), answer(*a))[1]  # type: ignore[method-assign]
            before, began, mine = resident_mb(pid), cpu_s(pid), time.process_time()
            start = time.perf_counter()
            ids = client.put_prompts([{} for _ in rows])
            for at in range(0, len(rows), 32):
                part = zip(ids[at : at + 32], rows[at : at + 32], strict=True)
                client.put_many([(id, None, values) for id, values in part])
            held = resident_mb(pid) - before
            got = client.get_experience("train", len(rows))
            seconds = time.perf_counter() - start
            cpu = cpu_s(pid) - began + time.process_time() - mine
            assert [r.columns for r in got] == rows
    finally:
        module.packing = packing
    numbers = sum(len(v) for r in rows for v in r.values())
    return {
        "bytes_per_number_sent": round(sent[0] / numbers, 2),
        "mb_sent": round(sent[0] / 1e6, 1),
        "service_grew_mb": round(held, 1),
        "cpu_s": round(cpu, 2),
        "seconds": round(seconds, 2),
    }


@contextmanager
def running(data: Path | None) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "rollart.cli.main", "service", "--json"]
    command += [] if data is None else ["--data", str(data)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert started.stdout is not None
        yield json.loads(started.stdout.readline())["url"], started.pid
    finally:
        started.terminate()
        started.wait(60)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100


if __name__ == "__main__":
    main()
