"""A stand-in for an OpenTelemetry collector: keeps the spans that are sent to it over OTLP with HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from helpers.echo_server import wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class SeenSpan:
    """A span as it was received. Times are in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    server: bool
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    failed: bool
    state: str
    resource: dict[str, Any]

    @classmethod
    def of(cls, span: Span, resource: dict[str, Any]) -> SeenSpan:
        return cls(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind == Span.SPAN_KIND_SERVER,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            [(event.name, event.time_unix_nano) for event in span.events],
            span.status.code == Status.STATUS_CODE_ERROR,
            span.trace_state,
            resource,
        )


@dataclass
class Collector:
    port: int
    spans: list[SeenSpan] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def trace(self, trace_id: str, requests: int = 1) -> list[SeenSpan]:
        """The spans of a trace, by start; waits until the spans of its requests, which end last, are there."""
        wait_for(lambda: sum(span.trace_id == trace_id and span.server for span in list(self.spans)) >= requests)
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)


@contextmanager
def run_collector(answers: threading.Event | None = None) -> Iterator[Collector]:
    """Runs a collector while the context is open. `answers`: it answers only once this is set."""
    collector = Collector(0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if answers is not None:
                answers.wait()
            collector.paths.append(self.path)
            collector.raw.append(body)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _values(group.resource.attributes)
                collector.spans += [SeenSpan.of(span, resource) for scope in group.scope_spans for span in scope.spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        collector.port = http.server_port
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield collector
        http.shutdown()


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
