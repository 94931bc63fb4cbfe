"""JSON Schemas of the reports of `rollart report ... -o json`, by `rollart schema report.NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.report.render import SCHEMA_VERSION

REPORTS: Mapping[str, Mapping[str, str]] = {
    "cost": {
        "total": "what unit value#",
        "plan": "what unit plan# actual# ratio#",
        "over_time": "from usd# so_far_usd# devices_usd# functions_usd# language_models_usd#",
        "by_tag": "tag value usd# share#",
        "by_role": "role usd# share# busy_usd# not_busy_usd#",
        "by_resource": "resource usd# share# busy_usd# not_busy_usd#",
        "elsewhere": "resource billed_s# usd#",
        "prices": "price unit kind usd_per_unit# amount# usd# cost date source",
        "trajectories": "fate trajectories# engine_seconds# usd#",
        "waste": "role cause usd# share#",
        "functions": "function provider status cause calls# items# cold_starts# cold_s# cold_billed_s# billed_s# "
        "estimated# estimated_s# gb_s# usd# cost usd_per_1000_items#",
        "tokens": "function endpoint model cause requests# input# cached# cache_write# output# usd# cost",
        "function_workers": "function provider memory_mb# how cold_s# busy_s# idle_s# idle_share# idle_usd# cost",
        "savings": "function stage items# billed_s# usd# cost",
        "stages": "function stage entered# acted# helped# waited_s# extra_calls# extra_billed_s# extra_usd# "
        "saved_calls# saved_billed_s# saved_usd# cost",
        "refused": "function provider limit by calls# beside",
    },
    "fleet": {
        "fleet": "runs# device_hours# usd# share# not_busy_usd# *",
        "total": "runs# usd#",
    },
    "utilization": {
        "resources": "resource role seconds# *#",
        "down": "cause resource seconds#",
        "nodes": "t# what subject moves? why?",
        "rates": "what count# per_second# per_busy_engine_second#",
        "domains": "domain purpose episodes# used# waiting# lost# success# turns# tokens# wall_s# engine_ms#",
        "health": "function outcomes# model_faults# infra_faults# rate# threshold# kinds",
        "refused": "function provider limit by calls# beside",
        "cancelled": "figure cancelled# kept# cancelled_count# kept_count# cliffs_delta# warning?",
        "filtered": "figure filtered# kept# filtered_count# kept_count# cliffs_delta# warning?",
        "engines": "engine prompt_tokens# hits# pulled# sampled_tokens# prefill_tokens_per_s# steps# batch# step_ms# "
        "kv_used# preemptions#",
        "efficiency": "part devices? busy_s# gflop_per_s# mfu# mfu_of_life# gb_per_s# mbu# padding#",
        "handoffs": "hand_offs# failed# failed_share# pulled_nothing# alarm?",
        "shares": "domain floor# cap# wanted# trained# drift_groups# worst_drift_groups#",
        "concurrency": "version *#",
        "updates": "engine loads# seconds# loaded_gb# skipped# saved_gb#",
        "broadcasts": "engine received# gb# seconds# gb_per_s# missed# why",
        "environments": "host domain *#",
        "places": "episodes *#",
    },
    "timeline": {
        "devices": "who parts# devices# busy_over_time *#",
        "trajectories": "who ended# peak# over_time *#",
        "calls": "who calls# peak# over_time *#",
        "faults": "who events# most_in_a_bin# over_time *#",
        "amounts": "who state t0# t1# amount#",
    },
    "curve": {
        "summary": "domain curve first# last# evaluated_first# evaluated_last#",
        "points": "domain kind version# success# low# high# episodes#",
        "sampled": "domain version# temperature# metric success# prompts#",
    },
    "offload": {
        "exposed": "function busy_s# exposed_s# share_of_run# exposed_usd# *#",
        "summary": "function calls# work_s# functions_usd# dedicated# dedicated_usd# dedicated_used# "
        "dedicated_wins_above# calls_per_s# break_even_per_s# cheapest",
        "ways": "function served_by workers# worker_s# used# wait_p50_ms# wait_p99_ms# cold_starts# usd# exposed_s# "
        "exposed_usd# total_usd#",
    },
    "bias": {
        "bias": "domain set against figure mean# mean_against# difference# ks# p# finding?",
        "sets": "domain set prompts# trajectories# cut_short# length# length_p50# length_p90# turns# difficulty# "
        "reward#",
    },
    "diff": {
        "inputs": "kind key a b",
        "outcome": "what unit a# b# difference# relative#",
        "curves": "domain kind samples# a# b# difference# low# high# a_episodes# b_episodes# finding",
        "seconds": "part a_s# b_s# difference_s# by_steps_s# by_speed_s# a_step_s# b_step_s#",
        "dollars": "role cause a_usd# b_usd# difference_usd# by_amount_usd# by_price_usd#",
        "waste": "role cause a_usd# b_usd# difference_usd#",
    },
    "advise": {
        "alarms": "alarm subject value# unit limit# meaning",
        "exposed": "part busy_s# exposed_s# share_of_run# exposed_usd#",
        "tried": "change seconds# saved_s# ±_s# saved# saved_usd# ±_usd# verdict reason",
        "advice": "rank# change saved_s# ±_s# saved# saved_usd# ±_usd# side_effect",
    },
}
"""Columns of every table by report. A name is a text, with `#` a number or null, with `?` a text or null; `*#`: further
columns of numbers, by state. `_` is a space in a timeline's names."""

OPTIONAL = frozenset({("timeline", "faults")})
"""Tables that a report may lack."""

TYPES: Mapping[str, Any] = {"#": ["number", "null"], "?": ["string", "null"]}


def report_schema(name: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of a report's JSON."""
    tables = {table: _table(name, columns) for table, columns in REPORTS[name].items()}
    properties = {
        "schema_version": {"const": SCHEMA_VERSION},
        "report": {"const": name},
        "run": {"type": "string"},
        "tables": {
            "type": "object",
            "properties": tables,
            "required": [table for table in tables if (name, table) not in OPTIONAL],
            "additionalProperties": False,
        },
        "notes": {"type": "array", "items": {"type": "string"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"rollart/report.{name}.json",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _table(report: str, columns: str) -> dict[str, Any]:
    further: Any = False
    properties: dict[str, Any] = {}
    for column in columns.split():
        kind = TYPES.get(column[-1], "string")
        if column.startswith("*"):
            further = {"type": kind}
            continue
        named = column.rstrip("#?")
        properties[named.replace("_", " ") if report == "timeline" else named] = {"type": kind}
    rows = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": further,
    }
    return {"type": "array", "items": rows}
