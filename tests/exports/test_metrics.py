"""The page of Prometheus metrics: names by its conventions, and the ledger's figures."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from rollart.errors import UsageError
from rollart.exports.figures import figures
from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost_lines
from rollart.report.rows import collect
from tests.report.test_perfetto import record


def test_names_follow_the_conventions(tmp_path: Path) -> None:
    """https://prometheus.io/docs/practices/naming: a prefix, base units, in lower case; the client adds `_total`."""
    asyncio.run(record(tmp_path))
    with LedgerReader(tmp_path) as reader:
        found = list(figures(collect(reader, "quick"), reader.events("step")))
    assert len({figure.name for figure in found}) == len(found)
    for figure in found:
        assert re.fullmatch("rollart_[a-z][a-z_]*[a-z]", figure.name)
        assert not figure.name.endswith(("_total", "_count", "_sum"))
        assert figure.help.endswith(".")
        assert all(len(labels) == len(figure.labels) for labels in figure.values)


def test_figures_are_the_ledgers(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path))
    with LedgerReader(tmp_path) as reader:
        rows = collect(reader, "quick")
        found = {figure.name: figure.values for figure in figures(rows, reader.events("step"))}
    usd: dict[tuple[str, ...], float] = defaultdict(float)
    for line in cost_lines(rows):
        usd[line.role,] += line.usd
    assert found["rollart_cost_usd"] == pytest.approx(usd)
    assert found["rollart_resource_seconds"]["engine", "idle", "starved"] == pytest.approx(5.0)
    assert found["rollart_steps"] == {(): 1.0}
    assert found["rollart_trajectories"] == {
        ("lake", "train", "trained"): 2.0,
        ("lake", "train", "waiting"): 2.0,
        ("lake", "train", "stale"): 1.0,
    }
    assert found["rollart_engine_kv_cache_usage_ratio"] == {("engine-0",): 0.25}
    assert found["rollart_function_calls"] == {("exact", "modal", "ok", "call"): 2.0}
    assert found["rollart_function_cold_starts"] == {("exact", "modal"): 1.0}
    assert found["rollart_step_metric"] == {("loss",): 0.5}


@pytest.mark.slow  # needs prometheus_client, which the fast suite's environment lacks
def test_a_scrape_has_every_figure_and_a_taken_port_is_refused(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from rollart.exports.metrics import serve_metrics
    from rollart.settings.telemetry import MetricsSpec

    directory = tmp_path / "quick"
    url = serve_metrics(directory, MetricsSpec(port=0))
    asyncio.run(record(directory))
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    with LedgerReader(directory) as reader:
        expected = list(figures(collect(reader, "quick"), reader.events("step")))
    for figure in expected:
        family = families[figure.name]
        assert family.type == figure.kind
        values = {tuple(s.labels[name] for name in figure.labels): s.value for s in family.samples}
        assert values == pytest.approx(figure.values)
        assert {s.labels["run"] for s in family.samples} <= {"quick"}
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(UsageError, match="cannot listen"):
        serve_metrics(directory, MetricsSpec(port=port))
