"""The engine's counters in Prometheus' text format, under vLLM's names where vLLM has one."""

from __future__ import annotations

from rollart.engine.handoff import KvHandoffs
from rollart.engine.runner import Runner


def render_metrics(runner: Runner, handoffs: KvHandoffs, *, held: int, paused: bool) -> str:
    """One line per metric. `held`: number of requests that wait for `resume`."""
    s, exports = runner.stats(), handoffs.exports
    computed = s.prompt_tokens - s.cached_tokens
    gauges = {
        "vllm:num_requests_running": s.running,
        "vllm:num_requests_waiting": s.waiting + held + handoffs.pulling,
        "vllm:kv_cache_usage_perc": s.kv_used,
        "vllm:engine_sleep_state": 0,
        f'vllm:cache_config_info{{block_size="{runner.context}",num_gpu_blocks="{runner.table.slots}"}}': 1,
        "rollart:paused": int(paused),
        "rollart:weight_version": runner.version,
        "rollart:idle_sessions": runner.table.idle_sessions(),
        "rollart:kept_tokens": runner.table.used_tokens(),
        "rollart:slots": runner.table.slots,
        "rollart:pending_kv_exports": len(exports),
        "rollart:pending_kv_export_bytes": exports.bytes,
    }
    counters = {
        "vllm:prompt_tokens_total": s.prompt_tokens,
        "vllm:generation_tokens_total": s.generated_tokens,
        "vllm:prefix_cache_queries_total": s.prompt_tokens,
        "vllm:prefix_cache_hits_total": s.cached_tokens - runner.imported_tokens,
        "vllm:external_prefix_cache_hits_total": runner.imported_tokens,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': computed,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': s.cached_tokens - runner.imported_tokens,
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': runner.imported_tokens,
        "vllm:num_preemptions_total": s.preemptions,
        "vllm:iteration_tokens_total_count": s.steps,
        "vllm:request_prefill_time_seconds_sum": s.prefill_seconds,
        "vllm:request_decode_time_seconds_sum": s.decode_seconds,
        "rollart:kv_exported_bytes_total": exports.exported_bytes,
        "rollart:kv_exports_taken_total": exports.taken,
        "rollart:kv_exports_expired_total": exports.expired,
        "rollart:kv_exports_dropped_total": exports.dropped,
        "rollart:kv_pull_failures_total": handoffs.failed,
        "rollart:kv_imports_dropped_total": runner.dropped_imports,
        **{f'rollart:kv_pulls_total{{transport="{t}"}}': p.pulls for t, p in handoffs.pulled.items()},
        **{f'rollart:kv_pulled_bytes_total{{transport="{t}"}}': p.bytes for t, p in handoffs.pulled.items()},
        **{f'rollart:kv_pull_seconds_sum{{transport="{t}"}}': p.seconds for t, p in handoffs.pulled.items()},
        **{f'vllm:request_success_total{{finished_reason="{r.value}"}}': n for r, n in runner.ended.items()},
    }
    lines = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        seen = set()
        for name, value in values.items():
            family = name.partition("{")[0]
            if family not in seen:
                lines.append(f"# TYPE {family} {kind}")
                seen.add(family)
            lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"
