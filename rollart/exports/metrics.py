"""Prometheus metrics of a run: `/metrics`, from the ledger, at each scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollart.errors import RollartError, UsageError
from rollart.exports.figures import STEP, RunMetric, figures
from rollart.ledger.reader import LedgerReader
from rollart.report.rows import collect
from rollart.settings.telemetry import MetricsSpec

FRESH_S = 2.0
"""Scrapes within so many seconds share a reading of the ledger: several servers may scrape one run."""


def read_figures(directory: Path) -> list[RunMetric]:
    """The figures of the run in `directory`; none as long as it has no ledger."""
    try:
        with LedgerReader(directory) as reader:
            return list(figures(collect(reader, directory.name), reader.events(STEP)))
    except RollartError:  # or it is being made
        return []


class LedgerCollector:
    """Collects a run's figures with the label `run`. Any thread may call it; readings take turns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._read: list[RunMetric] = []
        self._until = 0.0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._read = read_figures(self._directory)
                self._until = time.monotonic() + FRESH_S
            found = self._read
        for figure in found:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(figure.name, figure.help, labels=("run", *figure.labels))
            for labels, value in figure.values.items():
                family.add_metric((self._directory.name, *labels), value)
            yield family


def serve_metrics(directory: Path, spec: MetricsSpec) -> str:
    """Serve `/metrics` from threads until the process ends; returns the URL. UsageError if the address is taken."""
    registry = CollectorRegistry()
    registry.register(LedgerCollector(directory))
    try:
        server, _ = start_http_server(spec.port, spec.host, registry)
    except OSError as error:
        raise UsageError(
            f"telemetry.metrics: cannot listen on {spec.host}:{spec.port}: {error.strerror or error}",
            remedy="choose another port, or 0 for any free one",
        ) from None
    return f"http://{spec.host}:{server.server_port}/metrics"
