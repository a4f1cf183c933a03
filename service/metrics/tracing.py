"""Sends OpenTelemetry traces when an endpoint is set: one trace per batch, and one per HTTP request.

A batch's trace id is the 32 hex digits of its id, so either one leads to the other. The stages of a batch run in
several processes: each stage is a span of its own, below a span of the whole batch, which is sent when the batch ends.
"""

import atexit
import threading
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import islice

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | int | float | bool
MOST_BATCHES = 64  # one stage appears in the traces of at most so many batches; a window may serve thousands
NS = 1_000_000_000
END_S = 5.0
UNTRACED = {"/metrics", "/healthz", "/readyz", "/dashboard/events"}  # polled all the time, or open for minutes


class Traces:
    """Sends the spans of this process; `send_traces` creates it."""

    def __init__(self, endpoint: str, role: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._resource = Resource.create(
            {"service.name": f"batchweave-{role}", "service.version": version("batchweave-server")}
        )
        self._processor = BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces"))
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        atexit.register(self.end)
        self.tracer = self._provider.get_tracer("batchweave")

    def send(self, name: str, ids: SpanContext, between: tuple[float, float], attributes: dict[str, Value]) -> None:
        """Send a span with these ids; its start and end (unix seconds) may come from different processes."""
        span = ReadableSpan(
            name=name,
            context=ids,
            resource=self._resource,
            attributes=attributes,
            start_time=int(between[0] * NS),
            end_time=int(between[1] * NS),
        )
        self._processor.on_end(span)

    def flush(self) -> None:
        self._provider.force_flush()

    def end(self) -> None:
        """Send the remaining spans, for at most END_S: an unresponsive collector must not delay a stop."""
        atexit.unregister(self.end)
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(END_S)


_traces: Traces | None = None
log = structlog.get_logger()


def send_traces(endpoint: str | None, role: str) -> Traces | None:
    """Send this process's traces to this OTLP endpoint over HTTP from now on; with None, send none.

    The exporter reads OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE and _TIMEOUT by itself.
    """
    global _traces
    if _traces:
        _traces.end()
    wanted = endpoint if endpoint and endpoint.startswith(("http://", "https://")) else None
    if endpoint and not wanted:
        log.warning("tracing is off: OTEL_EXPORTER_OTLP_ENDPOINT must be an http:// or https:// URL")
    _traces = Traces(wanted, role) if wanted else None
    return _traces


@contextmanager
def stage(name: str, batch_ids: Iterable[str], **attributes: Value) -> Generator[None, None, None]:
    """Wrap the block in a span in the trace of each of these batches."""
    with ExitStack() as stack:
        if _traces:
            for batch_id in islice(batch_ids, MOST_BATCHES):
                parent = trace.set_span_in_context(NonRecordingSpan(_whole(batch_id)), Context())
                values = _named(batch=batch_id, **attributes)
                stack.enter_context(_traces.tracer.start_as_current_span(name, parent, attributes=values))
        yield


def batch_ended(batch_id: str, status: str, created_at: float, ended_at: float) -> None:
    """Send the span of the whole batch, the parent of its stages; times are unix seconds."""
    if _traces:
        _traces.send("batch", _whole(batch_id), (created_at, ended_at), _named(batch=batch_id, status=status))


class HttpSpan:
    """A span around the handling of an HTTP request, in the caller's trace if a `traceparent` header names one."""

    def __init__(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._method, self._span = method, None
        if _traces and path not in UNTRACED:
            caller = TraceContextTextMapPropagator().extract(
                {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            )
            self._span = _traces.tracer.start_span(method, caller, SpanKind.SERVER)

    def end(self, route: str, status: int, request_id: str) -> None:
        if self._span is None:
            return
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes(
            {"http.request.method": self._method, "http.route": route, "http.response.status_code": status}
        )
        self._span.set_attributes(_named(request=request_id))
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _whole(batch_id: str) -> SpanContext:
    """Return ids that every process can derive: the span id is the first 16 digits of the trace id."""
    digits, sampled = batch_id.removeprefix("batch_"), TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(digits, 16), int(digits[:16], 16), is_remote=True, trace_flags=sampled)


def _named(**attributes: Value) -> dict[str, Value]:
    return {f"batchweave.{name}": value for name, value in attributes.items()}
