"""Spans and metrics as a collector receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.exports.figures import figures
from rollart.ledger.reader import LedgerReader
from rollart.report.rows import collect
from rollart.settings.telemetry import OtlpSpec
from tests.exports.collector import OtlpCollector, attributes, collecting
from tests.report.test_perfetto import record

pytestmark = pytest.mark.slow  # needs OpenTelemetry's exporter, which the fast suite's environment lacks


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with collecting() as found:
        yield found


def test_a_run_is_one_trace_down_to_its_turns(collector: OtlpCollector, tmp_path: Path) -> None:
    from rollart.exports.spans import SpanFollower

    directory = tmp_path / "quick"
    follower = SpanFollower(directory, OtlpSpec(endpoint=collector.url, share=1.0), None)
    asyncio.run(record(directory))
    with LedgerReader(directory) as reader:
        follower.look(reader)
        before = len(collector.spans())
        follower.look(reader)
        assert len(collector.spans()) == before > 0
        follower.close(reader)
        utc = reader.utc()
    spans = collector.spans()
    assert len({span.trace_id for span in spans}) == 1
    assert len({span.span_id for span in spans}) == len(spans)
    by_id = {span.span_id: span for span in spans}

    def path(span: Any) -> list[str]:
        return [*(path(by_id[span.parent_span_id]) if span.parent_span_id else ()), span.name]

    paths = [" > ".join(path(span)) for span in spans]
    assert {"quick", "quick > step 1", "quick > step 1 > a", "quick > step 1 > a > a.0"} <= set(paths)
    assert "quick > step 1 > a > a.0 > turn 1 > generation" in paths
    assert "quick > step 1 > a > a.0 > turn 1 > environment" in paths
    assert "quick > step 1 > a > a.1 > reward" in paths
    assert {"quick > b.0", "quick > b.1", "quick > c.0"} <= set(paths), "they were not trained"
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    stale = next(span for span in spans if span.name == "c.0")
    assert stale.start_time_unix_nano == round(utc.unix_s(2.0) * 1e9)
    assert attributes(stale)["rollart.outcome"] == "stale"


def test_trajectories_are_linked_to_the_version_that_sampled_them(collector: OtlpCollector, tmp_path: Path) -> None:
    from rollart.exports.spans import SpanFollower

    directory = tmp_path / "quick"
    asyncio.run(record(directory, v0=1))
    follower = SpanFollower(directory, OtlpSpec(endpoint=collector.url, share=1.0), None)
    with LedgerReader(directory) as reader:
        follower.close(reader)
    by_name = {span.name: span for span in collector.spans()}
    (link,) = by_name["c.0"].links
    assert link.span_id == by_name["step 1"].span_id


def test_a_share_and_a_resumed_run(collector: OtlpCollector, tmp_path: Path) -> None:
    """Without a share of the prompts steps alone are sent; what an earlier life sent is not sent again."""
    from rollart.exports.spans import SpanFollower

    directory = tmp_path / "quick"
    asyncio.run(record(directory))
    for earlier, names in ((False, ["quick", "step 1"]), (True, ["quick"])):
        collector.bodies.clear()
        with LedgerReader(directory) as reader:
            spec = OtlpSpec(endpoint=collector.url, share=0.0)
            SpanFollower(directory, spec, reader if earlier else None).close(reader)
        assert sorted(span.name for span in collector.spans()) == names


def test_spans_that_a_collector_refuses_are_counted(collector: OtlpCollector, tmp_path: Path) -> None:
    from rollart.exports.spans import SpanFollower

    collector.status = 400
    directory = tmp_path / "quick"
    asyncio.run(record(directory))
    follower = SpanFollower(directory, OtlpSpec(endpoint=collector.url, share=1.0), None)
    with LedgerReader(directory) as reader:
        follower.close(reader)
    assert follower.lost == len(collector.spans()) > 0


def test_metrics_are_the_figures_of_the_ledger(collector: OtlpCollector, tmp_path: Path) -> None:
    from rollart.exports.spans import MetricFollower

    directory = tmp_path / "quick"
    follower = MetricFollower(directory, OtlpSpec(endpoint=collector.url))
    asyncio.run(record(directory))
    with LedgerReader(directory) as reader:
        follower.close(reader)
        expected = list(figures(collect(reader, "quick"), reader.events("step")))
    found = collector.metrics()
    for figure in (figure for figure in expected if figure.values):
        points = getattr(found[figure.name], "sum" if figure.kind == "counter" else "gauge").data_points
        values = {tuple(attributes(p)[name] for name in figure.labels): p.as_double for p in points}
        assert values == pytest.approx(figure.values)
