"""The cost of the sample table: rows per second through it, and memory per row.

    python benchmarks/data_plane.py [--rows 50000] [--rounds 3] [--json]

Each row belongs to a group of 8, has four columns that are written one by one, and is consumed by three tasks: reward
and reference in micro-batches of 32 rows, training in whole groups, 512 rows balanced over 8 consumers. CPU time of one
thread, the best of a few rounds, since the machine has other load.

whole      add, 4 puts and 3 takes per row
put        4 puts per row alone, into a table without readers
backlog    takes of 32 rows from a long backlog of ready rows: the cost of a slow consumer
balance    512 lengths over 8 consumers: rows per second of LPT and of largest differencing, and their largest load
           over the mean
memory     bytes per row held, without the row itself (its id, group and sizes)

Predicted before it was first run: whole 60,000 rows/s (about 16 us a row: 2 us to add, 1.2 us a put, 2 us a task, 3
us for grouping and balancing), put 800,000 puts/s, backlog 500,000 rows/s whatever its depth, LPT 1,000,000 rows/s
and within 1 % of the mean, differencing five times slower and within 0.1 %, 700 bytes a row. A run of 512 samples per
step at one step a minute needs 9 rows/s: the point of the figure is that the table is nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable

from rollart.policy.sample_table import Balanced, Fifo, SampleRow, SampleTable, WholeGroups
from rollart.shares import balanced_portions

COLUMNS = ("responses", "reward", "ref_logprobs", "advantage")
GROUP, MICRO, BATCH, CONSUMERS = 8, 32, 512, 8


def table(capacity: int) -> SampleTable:
    made = SampleTable(COLUMNS, capacity=capacity)
    made.declare("reward", ["responses"])
    made.declare("reference", ["responses"])
    made.declare("train", ["reward", "ref_logprobs", "advantage"], whole_groups=True)
    return made


def rows(count: int) -> list[SampleRow]:
    rng = random.Random(1)
    lengths = [max(1, min(int(rng.lognormvariate(6.3, 0.9)), 16_384)) for _ in range(count)]
    return [SampleRow(f"r{i}", f"g{i // GROUP}", GROUP, tokens, 0) for i, tokens in enumerate(lengths)]


def cpu(work: Callable[[], int], rounds: int) -> float:
    """Units of work per CPU-second, the best of `rounds`."""
    best = 0.0
    for _ in range(rounds):
        began = time.process_time()
        done = work()
        best = max(best, done / (time.process_time() - began))
    return best


def whole(samples: list[SampleRow]) -> int:
    """Waves of one batch: written, scored, referenced, trained."""
    t = table(2 * BATCH)
    micro, train = Fifo(MICRO), Balanced(WholeGroups(BATCH // GROUP), CONSUMERS)
    freed = 0
    for start in range(0, len(samples), BATCH):
        for row in samples[start : start + BATCH]:
            t.add(row)
            t.put(row.id, "responses")
        for task, column in (("reward", "reward"), ("reference", "ref_logprobs")):
            while (taken := t.take(task, micro)) is not None:
                for row_id in taken.consumed:
                    t.put(row_id, column)
        for row in samples[start : start + BATCH]:
            t.put(row.id, "advantage")
        taken = t.take("train", train)
        assert taken is not None
        freed += len(taken.freed)
    assert freed == len(samples), "every row was consumed by every task"
    return freed


def puts(samples: list[SampleRow]) -> int:
    t = table(len(samples))
    for row in samples:
        t.add(row)
    began = time.process_time()
    for column in COLUMNS:
        for row in samples:
            t.put(row.id, column)
    return int(len(samples) * len(COLUMNS) / (time.process_time() - began))


def backlog(samples: list[SampleRow]) -> int:
    t = table(len(samples))
    for row in samples:
        t.add(row, "responses")
    micro, began, taken = Fifo(MICRO), time.process_time(), 0
    while (got := t.take("reward", micro)) is not None:
        taken += len(got.consumed)
    return int(taken / (time.process_time() - began))


def balance(samples: list[SampleRow], rounds: int) -> tuple[float, float]:
    """Rows per CPU-second, and the mean over batches of the largest load over the mean load."""
    lengths = [r.tokens for r in samples]
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths) - BATCH + 1, BATCH)][:20]
    rate = cpu(lambda: sum(len(b) for b in batches if balanced_portions(b, CONSUMERS)), rounds)
    worst = [max(sum(b[i] for i in p) for p in balanced_portions(b, CONSUMERS)) * CONSUMERS / sum(b) for b in batches]
    return rate, sum(worst) / len(worst)


def memory(samples: list[SampleRow]) -> float:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    t = table(len(samples))
    for row in samples:
        t.add(row, *COLUMNS)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(t) == len(samples)
    return (after - before) / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rows < BATCH:
        parser.error(f"--rows {args.rows}: at least one batch of {BATCH}")
    samples = rows(args.rows // BATCH * BATCH)
    lpt, lpt_load = balance(samples, args.rounds)
    small = rows(len(samples) // 10 // GROUP * GROUP)
    results = {
        "rows": float(len(samples)),
        "whole_rows_per_s": cpu(lambda: whole(samples), args.rounds),
        "puts_per_s": float(max(puts(samples) for _ in range(args.rounds))),
        "backlog_rows_per_s": float(max(backlog(samples) for _ in range(args.rounds))),
        "backlog_tenth_rows_per_s": float(max(backlog(small) for _ in range(args.rounds))),
        "lpt_rows_per_s": lpt,
        "lpt_load": lpt_load,
        "bytes_per_row": memory(samples),
    }
    if args.json:
        print(json.dumps({"load": os.getloadavg()[0], **results}, indent=2))
        return
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name, value in results.items():
        print(f"{name:26}{value:>14,.{4 if value < 10 else 0}f}")


if __name__ == "__main__":
    main()
