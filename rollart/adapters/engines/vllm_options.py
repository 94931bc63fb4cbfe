"""Checks the start options of an attached vLLM server against the needs of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The options that a run needs. `tp` 0, `dtype` "auto", `block_size` None and `connector` "" accept any value."""

    context: int
    slots: int
    tp: int = 0
    dtype: str = "auto"
    block_size: int | None = None
    connector: str = ""


def wrong_options(needed: VllmOptions, info: Mapping[str, Any]) -> list[str]:
    """One text per wrong option, by its name on vLLM's command line. `info`: from `/server_info?config_format=json`.
    Options that it omits, as other vLLM versions may do, count as right."""
    return [
        f"{option} is {found} (rule: {rule})"
        for option, found, rule, right in _checks(needed, info.get("vllm_config") or {})
        if found is not ... and not right
    ]


def _checks(needed: VllmOptions, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, bool]]:
    def of(part: str, name: str) -> Any:
        return (config.get(part) or {}).get(name, ...)

    context, slots = of("model_config", "max_model_len"), of("scheduler_config", "max_num_seqs")
    yield "--max-model-len", context, f"at least model.context, {needed.context}", _at_least(context, needed.context)
    yield "--max-num-seqs", slots, f"at least engines.max_slots, {needed.slots}", _at_least(slots, needed.slots)
    mode = of("model_config", "logprobs_mode")
    yield "--logprobs-mode", mode, "processed_logprobs", mode == "processed_logprobs"
    if "weight_transfer_config" in config:
        backend = (config["weight_transfer_config"] or {}).get("backend")
        yield "--weight-transfer-config", backend, '{"backend": "rollart"}', backend == "rollart"
    if needed.tp:
        tp = of("parallel_config", "tensor_parallel_size")
        yield "--tensor-parallel-size", tp, f"the engine's devices, {needed.tp}", tp == needed.tp
    if needed.dtype != "auto":
        dtype = str(of("model_config", "dtype")).removeprefix("torch.")
        yield "--dtype", dtype, needed.dtype, dtype in (needed.dtype, "Ellipsis")
    if needed.block_size is not None:
        size = of("cache_config", "block_size")
        yield "--block-size", size, f"{needed.block_size}", size == needed.block_size
    if needed.connector and "kv_transfer_config" in config:
        name = (config["kv_transfer_config"] or {}).get("kv_connector")
        yield "--kv-transfer-config", name, f"a {needed.connector}, for prefill and decode", name == needed.connector


def _at_least(found: Any, least: int) -> bool:
    return not isinstance(found, int) or found >= least
