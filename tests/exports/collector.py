"""A real HTTP server that decodes OTLP's protobuf."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class OtlpCollector:
    """Decoded requests, by path; `status` is its answer."""

    url: str = ""
    status: int = 200
    bodies: list[tuple[str, bytes]] = field(default_factory=list)

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for path, body in self.bodies if path == "/v1/traces"]
        return [s for r in requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    def metrics(self) -> dict[str, Any]:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        requests = [ExportMetricsServiceRequest.FromString(b) for path, b in self.bodies if path == "/v1/metrics"]
        return {m.name: m for r in requests for rm in r.resource_metrics for sm in rm.scope_metrics for m in sm.metrics}


@contextlib.contextmanager
def collecting() -> Iterator[OtlpCollector]:
    """A collector while the body runs."""
    found = OtlpCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            found.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
