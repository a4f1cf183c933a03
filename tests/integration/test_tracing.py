"""Traces as a collector gets them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sqlalchemy import update
from structlog.testing import capture_logs

from service.db.tables import Batch
from service.jobs.webhooks import Webhooks
from service.metrics import tracing
from service.metrics.tracing import Traces, send_traces
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Generator[str, None, None]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def collector() -> Generator[tuple[str, list[Span]], None, None]:
    """Where it is, and the spans that came."""
    spans: list[Span] = []

    class Receiver(Quiet):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for each in sent.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serving(Receiver) as url:
        yield url, spans


@pytest.fixture
def traced() -> Generator[tuple[Traces, list[Span]], None, None]:
    with collector() as (url, spans):
        traces = send_traces(url, "test")
        assert traces is not None
        yield traces, spans
        send_traces(None, "test")


def values(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


async def test_a_batch_is_one_trace_whose_id_is_its_own(harness: Harness, traced: tuple[Traces, list[Span]]) -> None:
    traces, spans = traced
    batch_id = await harness.submit(jsonl(line(n) for n in range(12)))
    other = await harness.submit(b"[]\n")
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    traces.flush()
    mine = [span for span in spans if span.trace_id.hex() == batch_id.removeprefix("batch_")]
    slices = sum(span.name == "slice" for span in mine)
    assert slices >= 2
    assert Counter(span.name for span in mine) == {"validate": 1, "plan": 1, "slice": slices, "finalize": 1, "batch": 1}
    [whole] = [span for span in mine if span.name == "batch"]
    assert values(whole)["batchweave.status"] == "completed"
    assert {span.parent_span_id for span in mine if span is not whole} == {whole.span_id}
    assert {values(span)["batchweave.batch"] for span in mine} == {batch_id}
    assert sum(int(values(span)["batchweave.requests"]) for span in mine if span.name == "slice") == 12
    theirs = [span for span in spans if values(span)["batchweave.batch"] == other]
    assert {(span.name, values(span).get("batchweave.status")) for span in theirs} == {
        ("validate", None),
        ("batch", "failed"),
    }


def test_a_request_joins_its_callers_trace(settings: Settings, clock: Clock, traced: tuple[Traces, list[Span]]) -> None:
    traces, spans = traced
    caller = "0af7651916cd43dd8448eb211c80319c"
    with serve(settings, clock) as url:
        found = httpx.get(f"{url}/v1/batches/batch_x", headers={"traceparent": f"00-{caller}-b7ad6b7169203331-01"})
    traces.flush()
    [span] = spans
    assert (span.name, span.trace_id.hex()) == ("GET /v1/batches/{batch_id}", caller)
    assert values(span)["http.response.status_code"] == 404
    assert values(span)["batchweave.request"] == found.headers["x-request-id"]


async def test_a_collector_that_is_away_changes_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    asked: list[str] = []

    class Refusing(Quiet):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_error(500)

    with serving(Refusing) as url:
        traces = send_traces(url, "test")
        assert traces is not None
        batch_id = await harness.submit(jsonl(line(n) for n in range(4)))
        await harness.plan()
        async with harness.working(ScriptedEngine()):
            await asyncio.to_thread(traces.flush)
            [batch] = await harness.until_ended(batch_id)
        send_traces(None, "test")
    assert asked
    assert (batch.status, batch.completed) == ("completed", 4)


async def test_other_stages_are_in_the_batchs_trace(
    harness: Harness, clock: Clock, traced: tuple[Traces, list[Span]]
) -> None:
    traces, spans = traced
    held, late = await harness.submit(jsonl([line(1)])), await harness.submit(jsonl([line(1)]), window_s=10)
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == held).values(held=True))
    clock.now += 60
    await harness.expiry.run_once()
    await harness.plan()
    traces.flush()
    names = {each: [span.name for span in spans if values(span)["batchweave.batch"] == each] for each in (held, late)}
    assert names == {held: ["validate", "preview"], late: ["batch"]}


async def test_a_webhook_is_in_the_batchs_trace(
    harness: Harness, settings: Settings, clock: Clock, traced: tuple[Traces, list[Span]]
) -> None:
    traces, spans = traced

    class Away(Quiet):
        def do_POST(self) -> None:
            self.send_error(503)

    settings = settings.model_copy(update={"webhook_private": True})
    with serving(Away) as receiver, serve(settings, clock) as url:
        wanted = {"name": "x", "url": receiver, "event_types": ["batch.failed"]}
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{url}/v1/webhook_endpoints", json=wanted)).status_code == 200
        batch_id = await harness.submit(b"[]\n")
        await harness.plan()
        assert await Webhooks(harness.database, settings, clock).run_once()
    traces.flush()
    [span] = [span for span in spans if span.name == "webhook"]
    assert span.trace_id.hex() == batch_id.removeprefix("batch_")
    assert str(values(span)["batchweave.event"]).startswith("evt_")


def test_what_is_asked_all_the_time_is_not_traced(
    settings: Settings, clock: Clock, traced: tuple[Traces, list[Span]]
) -> None:
    traces, spans = traced
    with serve(settings, clock) as url:
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
    traces.flush()
    assert spans == []


def test_an_address_that_is_none_for_http_is_said_and_nothing_is_traced() -> None:
    with capture_logs() as logged:
        assert send_traces("collector:4317", "test") is None
    assert "tracing is off" in logged[0]["event"]


def test_a_silent_collector_holds_a_stop_up_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "END_S", 0.2)
    asked, answer = threading.Event(), threading.Event()

    class Silent(Quiet):
        def do_POST(self) -> None:
            asked.set()
            answer.wait(60)

    with serving(Silent) as url:
        traces = send_traces(url, "test")
        assert traces is not None
        with tracing.stage("plan", [f"batch_{32 * 'a'}"]):
            pass
        send_traces(None, "test")  # comes back while the collector still says nothing
        assert asked.wait(30)
        assert not answer.is_set()
        answer.set()
