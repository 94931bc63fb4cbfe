"""Kept trajectories as a file for other tools: JSON Lines or Parquet, one trajectory per line or row.

Every line has what the viewers of three rollout dumps look for: `prompt` and `completion` as messages with `reward`,
`metrics` and `task` (results of verifiers), `step`, `prompt`, `completion` and one column per reward function
(completions of TRL), and the texts `input`, `output` and `gts` with `score` and `step` (`rollout_data_dir` of verl).
`messages` is the whole conversation. Tokens, log-probabilities, versions and the loss mask are beside them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rollart.errors import UsageError
from rollart.ledger.kept import KeptTrajectory
from rollart.ledger.reader import LedgerReader, TrajectoryRow
from rollart.model import Scored, SegmentKind
from rollart.report.trajectories.listing import SecondPrices, outcome_of, recorded_outcomes

SUFFIXES = (".jsonl", ".parquet")

ROWS = 1024
"""Rows of a Parquet row group."""


def entry(kept: KeptTrajectory, row: TrajectoryRow, usd: Mapping[str, float]) -> dict[str, Any]:
    """A trajectory as one line."""
    t = kept.trajectory
    messages = [
        message
        for turn in t.turns
        for message in ({"role": "user", "content": turn.observation}, {"role": "assistant", "content": turn.action})
    ]
    reference = t.metadata.get("reference_answer")
    scores = {s.function: s.outcome.value if isinstance(s.outcome, Scored) else None for s in kept.scores}
    return {
        "id": t.id,
        "group": t.group,
        "task": t.domain,
        "outcome": outcome_of(row),
        "step": row.step,
        "v0": row.v0,
        "seed": t.seed,
        "prompt": messages[:1],
        "completion": messages[1:],
        "messages": messages,
        "input": messages[0]["content"] if messages else "",
        "output": "\n".join(message["content"] for message in messages[1:]),
        "gts": None if reference is None else str(reference),
        "answer": None if reference is None else str(reference),
        "reward": row.score,
        "score": row.score,
        "success": None if row.success is None else bool(row.success),
        "metrics": scores,
        "reward_functions": [
            {"function": s.function, "version": s.version, "weight": s.weight, "score": scores[s.function]}
            for s in kept.scores
        ],
        "env_rewards": [turn.env_reward for turn in t.turns],
        "token_ids": list(t.token_ids),
        "logprobs": [p for s in t.segments for p in (s.logprobs or (0.0,) * len(s.token_ids))],
        "loss_mask": [int(m) for s in t.segments for m in s.loss_mask],
        "versions": [v for s in t.segments for v in (_version(s.policy_version),) * len(s.token_ids)],
        "turn": [n for s in t.segments for n in (s.turn if s.kind is SegmentKind.ACTION else -1,) * len(s.token_ids)],
        "truncated": t.truncated,
        "began_s": row.t0,
        "seconds": row.t1 - row.t0,
        "engine_s": row.engine_s,
        "reset_s": row.reset_s,
        "environment_s": row.env_s,
        "reward_s": row.reward_s,
        "usd": sum(usd.values()),
    }


def _version(version: int | None) -> int:
    """-1 for a token that was not sampled, as in a `TrainSample`."""
    return -1 if version is None else version


def entries(reader: LedgerReader, *, domain: str | None, outcome: str | None) -> Iterator[dict[str, Any]]:
    """The kept trajectories of a domain and with an outcome, in the order in which they ended."""
    prices = SecondPrices.of(reader)
    chosen = reader.trajectories(domain=domain, outcomes=recorded_outcomes(outcome))
    rows = {(row.id, row.t1): row for row in chosen}
    for kept in reader.kept():
        if (row := rows.get((kept.id, kept.t))) is not None:
            yield entry(kept, row, prices.usd(row))


def write_entries(path: Path, found: Iterator[dict[str, Any]]) -> int:
    """Write the lines to a `.jsonl` or `.parquet` file; how many. UsageError for another name, or for Parquet without
    pyarrow."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            return sum(file.write(f"{json.dumps(one | _by_function(one['metrics'], one))}\n") > 0 for one in found)
    if path.suffix == ".parquet":
        return _write_parquet(path, found)
    raise UsageError(f"{path}: unknown kind of file (rule: {' or '.join(SUFFIXES)})", remedy="rename the file")


def _by_function(metrics: Mapping[str, Any], columns: Container[str]) -> dict[str, Any]:
    """One column per reward function; `reward_NAME` where there is a column with its name."""
    return {f"reward_{name}" if name in columns else name: value for name, value in metrics.items()}


def _write_parquet(path: Path, found: Iterator[dict[str, Any]]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("Parquet needs pyarrow", remedy="pip install pyarrow, or name a .jsonl file") from None
    functions: dict[str, None] = {}
    batches, count = [], 0
    while batch := list(islice(found, ROWS)):
        functions |= dict.fromkeys(name for one in batch for name in one["metrics"])
        batches.append(pa.Table.from_pylist([_flat(one) for one in batch], schema=_schema(pa)))
        count += len(batch)
    whole = pa.concat_tables(batches) if batches else _schema(pa).empty_table()
    metrics = [json.loads(one) for one in whole.column("metrics").to_pylist()]
    for column, name in _by_function({name: name for name in functions}, whole.column_names).items():
        whole = whole.append_column(column, pa.array([one.get(name) for one in metrics], pa.float64()))
    pq.write_table(whole, path, row_group_size=ROWS)
    return count


def _flat(one: dict[str, Any]) -> dict[str, Any]:
    return one | {"metrics": json.dumps(one["metrics"])}


def _schema(pa: Any) -> Any:
    """Columns by type: a column of nulls alone would have none otherwise."""
    message = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    function = pa.struct(
        [("function", pa.string()), ("version", pa.string()), ("weight", pa.float64()), ("score", pa.float64())]
    )
    kinds = {
        pa.string(): "id group task outcome input output gts answer metrics",
        pa.int64(): "step v0 seed",
        pa.float64(): "reward score began_s seconds engine_s reset_s environment_s reward_s usd",
        pa.bool_(): "success truncated",
        message: "prompt completion messages",
        pa.list_(function): "reward_functions",
        pa.list_(pa.float64()): "env_rewards",
        pa.list_(pa.float32()): "logprobs",
        pa.list_(pa.int32()): "token_ids versions turn",
        pa.list_(pa.int8()): "loss_mask",
    }
    return pa.schema([(name, kind) for kind, names in kinds.items() for name in names.split()])
