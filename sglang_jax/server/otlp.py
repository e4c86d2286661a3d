"""Writes traces as OpenTelemetry's spans, and sends them to a collector over OTLP. The only module that imports
OpenTelemetry, and itself imported only if traces are on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sglang_jax.about import version
from sglang_jax.errors import ConfigError, quote
from sglang_jax.server.tracing import Span, Value

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
"""The path of an endpoint that is given without one."""

QUEUE_VARIABLES = (
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_EXPORT_TIMEOUT",
)
"""Variables of the environment for the queue of spans."""

FLUSH_SECONDS = 5.0
"""Maximum seconds at shutdown to send the spans that are left."""

W3C = TraceContextTextMapPropagator()
"""Reads and writes `traceparent` and `tracestate`. Not baggage: spans here have none of it."""

HEADERS_LOGGER = "opentelemetry.trace.span"
"""Logs each invalid `tracestate`, with its text: clients could fill a disk."""

SERVICE_NAME = "sglang-jax"
"""The service's name in traces, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` has one."""


class OtlpSpans:
    """A `SpanWriter`. A thread sends spans in batches. If its queue is full, spans are dropped, so requests do not wait
    for a collector that is slow or down. The SDK reads its own variables of the environment: sampler, headers, queue.
    Raises `ConfigError` for those of the queue.
    """

    def __init__(self, endpoint: str) -> None:
        logging.getLogger(HEADERS_LOGGER).setLevel(logging.ERROR)
        defaults = Resource.create({"service.name": SERVICE_NAME, "service.version": version()})
        self._provider = TracerProvider(
            resource=defaults.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_batches(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("sglang_jax", version())

    def start(self, name: str, headers: Mapping[str, str], start: int, attributes: Mapping[str, Value]) -> Span:
        span = self._tracer.start_span(
            name, W3C.extract(headers, Context()), SpanKind.SERVER, attributes=dict(attributes), start_time=start
        )
        return _RequestSpan(self._tracer, span)

    def close(self) -> None:
        """Sends what is left, for at most `FLUSH_SECONDS`."""
        flush = threading.Thread(target=self._provider.shutdown, name="last-traces", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)
        if flush.is_alive():
            logger.warning("The last traces were not sent within %g s", FLUSH_SECONDS)


class _RequestSpan:
    """A `Span` of a request."""

    def __init__(self, tracer: Tracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        W3C.inject(headers, self._context)
        return headers

    def child(
        self, name: str, start: int, end: int, attributes: Mapping[str, Value], events: Sequence[tuple[str, int]] = ()
    ) -> None:
        child = self._tracer.start_span(name, self._context, attributes=dict(attributes), start_time=start)
        for event, moment in events:
            child.add_event(event, timestamp=moment)
        child.end(end)

    def end(self, end: int, attributes: Mapping[str, Value], error: str | None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(end)


def _batches(exporter: OTLPSpanExporter) -> BatchSpanProcessor:
    try:
        return BatchSpanProcessor(exporter)
    except ValueError as error:
        given = ", ".join(f"{name}={quote(value)}" for name, value in os.environ.items() if name in QUEUE_VARIABLES)
        raise ConfigError(f"OpenTelemetry refuses {given}: {error}") from error


def traces_url(endpoint: str) -> str:
    """Returns the address to send spans to: `TRACES_PATH` of an endpoint without a path."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


@contextmanager
def otlp_spans(endpoint: str) -> Iterator[OtlpSpans]:
    """Sends spans while the context is open, and those that are left at its end."""
    spans = OtlpSpans(endpoint)
    try:
        yield spans
    finally:
        spans.close()
