"""Missing requirements of a run are reported by its spec's settings, before any part is made."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from rollart.errors import SpecError
from rollart.launch.requirements import refuse_missing, requirements
from rollart.settings.resolve import resolve_files


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return None if name in modules else find("json", *more)  # all others are installed

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("overrides", "module", "says", "remedy"),
    [
        (["training.lora={rank: 2}"], "peft", "training.lora", "rollart[lora]"),
        (
            ["weights.store={kind: s3, url: 's3://b', local: /disk}"],
            "aiobotocore",
            "weights.store.kind is 's3'",
            "rollart[aws]",
        ),
        (["cluster.runtime.backend=ray"], "ray", "cluster.runtime.backend is 'ray'", "rollart[ray]"),
        (["telemetry.metrics={port: 0}"], "prometheus_client", "telemetry.metrics", "rollart[metrics]"),
        (
            ["telemetry.otlp={endpoint: 'http://here:4318'}"],
            "opentelemetry.exporter.otlp.proto.http",
            "telemetry.otlp",
            "rollart[otel]",
        ),
        (["telemetry.track=[wandb]"], "wandb", "telemetry.track has 'wandb'", "rollart[wandb]"),
        ([], "torch", "the embedded trainer", "rollart[local]"),
        ([], "gymnasium", "domains.frozen_lake.environment", "rollart[envs]"),
    ],
)
def test_what_is_missing_is_said_with_its_key_and_remedy(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], module: str, says: str, remedy: str
) -> None:
    resolved = resolve_files(overrides=overrides)
    without(monkeypatch)
    refuse_missing(resolved)
    without(monkeypatch, module)
    with pytest.raises(SpecError, match="not installed") as refused:
        refuse_missing(resolved)
    assert says in refused.value.message
    assert module in refused.value.message
    assert remedy in refused.value.remedy


def test_machines_of_others_have_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_files(
        overrides=["training.lora={rank: 2}", "cluster.runtime={backend: ray, address: 'head:6379'}"]
    )
    without(monkeypatch, "peft", "torch", "gymnasium", "reasoning_gym")
    refuse_missing(resolved)
    without(monkeypatch, "ray")
    with pytest.raises(SpecError, match="ray is not installed"):
        refuse_missing(resolved)


def test_a_chat_template_is_not_always_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = "domains.frozen_lake.environment={harness: tests.proxy.agents:two_answers}"
    resolved = resolve_files(overrides=[harness, "domains.frozen_lake.environment_args={}"])
    assert ("jinja2", False) in {(need.module, need.needed) for need in requirements(resolved)}
    without(monkeypatch, "jinja2")
    refuse_missing(resolved)
