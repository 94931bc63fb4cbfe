"""Spans and metrics of a run for an OpenTelemetry collector, over OTLP.

run > step > group > trajectory > reset, turn > generation and environment, reward. A trajectory is linked to the step
whose version sampled its first token, a turn to the step whose version it was sampled with. Spans are made from the
ledger when their step is over, so that their groups and fates are known; those of trajectories that were not trained
are made when the run ends. A span's id comes from its name: the spans of a resumed run belong to one trace.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from rollart.exports.figures import STEP, RunMetric, figures
from rollart.ledger.events import TURN
from rollart.ledger.reader import LedgerReader, TrajectorySpan
from rollart.ledger.utc import UtcTimes
from rollart.ports import RunEvent
from rollart.report.rows import collect
from rollart.settings.telemetry import OtlpSpec, is_traced

BATCH = 512
"""Spans per request."""

REQUEST_S = 5.0
"""Longest wait for a collector, retries included: spans that it does not take by then are lost, and counted."""

METRICS_S = 10.0
"""Seconds between two sendings of the metrics."""

logger = logging.getLogger(__name__)

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


def span_number(name: str, size: int) -> int:
    """An id of `size` bytes that is not 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=size).digest(), "big") or 1


class _NamedIds(IdGenerator):  # type: ignore[misc]
    """The ids of the next span."""

    def __init__(self, trace_id: int) -> None:
        self.trace_id, self.span_id = trace_id, 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Collected(SpanProcessor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanFollower:
    """Sends the spans of one life of a run. `look` sends those of the steps that ended since the last time, `close` the
    rest. One thread. A collector that is slow or gone delays the follower by `REQUEST_S` a batch, and nothing else:
    `lost` counts the spans that it did not take."""

    def __init__(self, directory: Path, spec: OtlpSpec, reader: LedgerReader | None) -> None:
        """`reader`: of the ledger before this life; None for a new run."""
        self._run, self._share = directory.name, spec.share
        self._exporter = OTLPSpanExporter(f"{spec.endpoint.rstrip('/')}/v1/traces", timeout=REQUEST_S)
        self._row, self._from_s, self._life = 0, 0.0, 0
        if reader is not None:
            self._row, earlier = reader.events_after(0, STEP)
            self._from_s = reader.facts().seconds
            self._life = int(earlier[-1].fields["version"] or 0) if earlier else 0
        self._began_s = self._from_s
        self._turns: dict[str, list[RunEvent]] = defaultdict(list)
        self._ids = _NamedIds(span_number(f"run {self._run}", 16))
        self._collected = _Collected()
        self._resource = Resource.create({"service.name": "rollart", "rollart.run": self._run})
        provider = TracerProvider(resource=self._resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._collected)
        self._tracer = provider.get_tracer("rollart")
        self.lost = 0

    def look(self, reader: LedgerReader) -> None:
        self._row, events = reader.events_after(self._row, STEP, TURN)
        utc = reader.utc()
        for event in events:
            if event.kind == TURN:
                self._turns[event.subject].append(event)
                continue
            version = int(event.fields["version"] or 0)
            self._step(version, event, reader.trajectory_spans(version), utc)
            self._from_s = event.t
        self._send()

    def close(self, reader: LedgerReader) -> None:
        self.look(reader)
        utc, seconds = reader.utc(), reader.facts().seconds
        life = self._life_name
        for t in reader.trajectory_spans():
            if t.version is None and t.t1 >= self._began_s:
                self._trajectory(t, life, utc)
        attributes = {"rollart.versions": len(reader.versions())}
        self._span(self._run, life, "", self._began_s, seconds, attributes, utc)
        self._send()
        if self.lost:
            logger.error("%d spans were not accepted by the collector", self.lost)
        self._exporter.shutdown()

    @property
    def _life_name(self) -> str:
        return f"life from v{self._life}"

    def _step(self, version: int, event: RunEvent, trained: Iterable[TrajectorySpan], utc: UtcTimes) -> None:
        step = _step_name(version)
        fields = {f"rollart.{k}": v for k, v in event.fields.items() if isinstance(v, int | float)}
        self._span(f"step {version}", step, self._life_name, self._from_s, event.t, fields, utc)
        groups: dict[str, list[TrajectorySpan]] = defaultdict(list)
        for t in trained:
            groups[t.group].append(t)
        for group, members in groups.items():
            if is_traced(group, self._share):
                self._group(group, members, step, utc)
            for t in members:
                self._turns.pop(t.trajectory, None)

    def _group(self, group: str, members: Sequence[TrajectorySpan], parent: str, utc: UtcTimes) -> None:
        name = f"group {group}"
        begins, ends = min(t.t0 for t in members), max(t.t1 for t in members)
        attributes: Attributes = {"rollart.domain": members[0].domain, "rollart.trajectories": len(members)}
        self._span(group, name, parent, begins, ends, attributes, utc)
        for t in members:
            self._trajectory(t, name, utc)

    def _trajectory(self, t: TrajectorySpan, parent: str, utc: UtcTimes) -> None:
        turns = self._turns.pop(t.trajectory, [])
        if not is_traced(t.group or t.trajectory.rpartition(".")[0], self._share):
            return
        name = f"trajectory {t.trajectory} {t.t0}"
        attributes: dict[str, str | int | float | bool] = {
            "rollart.domain": t.domain,
            "rollart.purpose": t.purpose,
            "rollart.outcome": t.outcome,
            "rollart.first_version": t.v0,
            "rollart.turns": t.turns,
            "rollart.prompt_tokens": t.prompt_tokens,
            "rollart.action_tokens": t.action_tokens,
            "rollart.engine_seconds": t.engine_seconds,
            "rollart.environment_seconds": t.env_s,
        }
        if t.score is not None:
            attributes["rollart.score"] = t.score
        self._span(t.trajectory, name, parent, t.t0, t.t1, attributes, utc, version=t.v0)
        self._span("reset", f"{name} reset", name, t.t0, min(t.t1, t.t0 + t.reset_s), {}, utc)
        for turn in turns:
            self._turn(turn, name, utc)
        if t.reward_s is not None:
            self._span("reward", f"{name} reward", name, max(t.t0, t.t1 - t.reward_s), t.t1, {}, utc)

    def _turn(self, turn: RunEvent, parent: str, utc: UtcTimes) -> None:
        number = turn.fields["turn"]
        acted = turn.t - float(turn.fields["environment_s"] or 0.0)
        begins = acted - float(turn.fields["generation_s"] or 0.0)
        version = int(turn.fields["version"] or 0)
        name = f"{parent} turn {number}"
        attributes = {
            f"rollart.{k}": turn.fields[k] or 0 for k in ("version", "tokens", "prompt_tokens", "cached_tokens")
        }
        engine = {"rollart.engine": str(turn.fields["engine"])}
        self._span(f"turn {number}", name, parent, begins, turn.t, {}, utc, version=version)
        self._span("generation", f"{name} generation", name, begins, acted, {**attributes, **engine}, utc)
        self._span("environment", f"{name} environment", name, acted, turn.t, {}, utc)

    def _span(
        self,
        shown: str,
        name: str,
        parent: str,
        t0: float,
        t1: float,
        attributes: Attributes,
        utc: UtcTimes,
        *,
        version: int = 0,
    ) -> None:
        """A span from t0 to t1 seconds of the run; `version`: of the step to which it is linked, 0: none."""
        context = trace.set_span_in_context(trace.NonRecordingSpan(self._context(parent))) if parent else None
        links = [trace.Link(self._context(_step_name(version)), {"rollart.version": version})] if version > 0 else []
        self._ids.span_id = span_number(name, 8)
        start_ns, end_ns = (round(utc.unix_s(t) * 1e9) for t in (t0, max(t0, t1)))
        span = self._tracer.start_span(shown, context, attributes=attributes, links=links, start_time=start_ns)
        span.end(end_ns)

    def _context(self, name: str) -> trace.SpanContext:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.SpanContext(self._ids.trace_id, span_number(name, 8), is_remote=False, trace_flags=flags)

    def _send(self) -> None:
        spans, self._collected.spans = self._collected.spans, []
        for n in range(0, len(spans), BATCH):
            batch: Sequence[ReadableSpan] = spans[n : n + BATCH]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                self.lost += len(batch)


def _step_name(version: int) -> str:
    return f"step to v{version}"


class MetricFollower:
    """Sends a run's figures as metrics every `METRICS_S`, in a thread of its own; `look` reads them."""

    def __init__(self, directory: Path, spec: OtlpSpec) -> None:
        resource = Resource.create({"service.name": "rollart", "rollart.run": directory.name})
        exporter = OTLPMetricExporter(f"{spec.endpoint.rstrip('/')}/v1/metrics", timeout=REQUEST_S)
        reader = PeriodicExportingMetricReader(exporter, METRICS_S * 1e3, REQUEST_S * 1e3)
        self._run = directory.name
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("rollart")
        self._latest: dict[str, RunMetric] = {}
        self._read_at = -METRICS_S

    def look(self, reader: LedgerReader) -> None:
        if time.monotonic() >= self._read_at + METRICS_S:
            self._read_at = time.monotonic()
            self._read(reader)

    def close(self, reader: LedgerReader) -> None:
        self._read(reader)
        self._provider.shutdown(REQUEST_S * 1e3)

    def _read(self, reader: LedgerReader) -> None:
        for figure in figures(collect(reader, self._run), reader.events(STEP)):
            known = figure.name in self._latest
            self._latest[figure.name] = figure
            if not known:
                counter, gauge = self._meter.create_observable_counter, self._meter.create_observable_gauge
                create = counter if figure.kind == "counter" else gauge
                create(figure.name, [self._observe(figure.name)], description=figure.help)

    def _observe(self, name: str) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            figure = self._latest[name]
            return [
                Observation(value, dict(zip(figure.labels, labels, strict=True)))
                for labels, value in figure.values.items()
            ]

        return observe
