"""Handlers as people have them: Lambda's two arguments, a list, async, and answers that break the contract."""

import asyncio
import pathlib
import sys


def lambda_handler(event, context):
    left = context.get_remaining_time_in_millis()
    ok = 0 < left <= 5000 and context.memory_limit_in_mb == 128 and context.function_name and context.aws_request_id
    return [{"id": e["id"], "aggregate_reward_score": float(bool(ok)), "metrics_list": []} for e in event]


def raising(event, context):
    if any(e["metadata"].get("poison") for e in event):
        raise RuntimeError("poison")
    return [{"id": e["id"], "aggregate_reward_score": 1.0} for e in event]


def listed(items):
    return [{"id": e["id"], "aggregate_reward_score": len(items)} for e in items]


def short(items):
    return [{"id": e["id"], "aggregate_reward_score": 1.0} for e in items[1:]]


def confused(items):
    return [{"id": "who?", "aggregate_reward_score": 1.0}]


def unserialisable(items):
    return [{"id": e["id"], "aggregate_reward_score": object()} for e in items]


async def concurrent(sample):
    if "begun" in sample.metadata:
        pathlib.Path(sample.metadata["begun"]).touch()
    await asyncio.sleep(sample.metadata.get("seconds", 0.05))
    return 1.0


def imported(items):
    return [{"id": e["id"], "aggregate_reward_score": float("fractions" in sys.modules)} for e in items]


def chatty(items):
    return "hello"
