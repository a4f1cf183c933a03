"""What each process counts of its own work, for Prometheus; docs/metrics.md defines every figure."""

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import REGISTRY, Counter, Histogram, start_http_server

from service.objects.shards import Usage

QUICK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_S = (0.01, 0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

HTTP = Histogram(
    "batchweave_http_request_seconds",
    "From a request's headers to the last byte of its answer, by the route's template",
    ("method", "route", "status"),
    buckets=QUICK_S,
)
JOBS = Histogram(
    "batchweave_job_seconds", "Rounds of a control plane's job that had something to do", ("name",), buckets=LONG_S
)
JOB_FAILURES = Counter("batchweave_job_failures", "Rounds that failed and are tried again", ("name",))
VALIDATED = Counter("batchweave_validated_requests", "Requests in files that were validated")
BATCHES_ENDED = Counter("batchweave_batches_ended", "Batches that this process ended", ("status",))
DELIVERIES = Counter("batchweave_webhook_deliveries", "Attempts to deliver a webhook", ("outcome",))
LEASES_EXPIRED = Counter("batchweave_leases_expired", "Slices taken from workers that were silent")
SLICES = Counter("batchweave_slices_run", "Slices that a worker let go of", ("model", "outcome"))
ANSWERS = Counter("batchweave_answers", "Durable answers", ("model", "outcome"))
TOKENS = Counter("batchweave_answer_tokens", "Tokens of durable answers", ("model", "kind"))
RETRIES = Counter("batchweave_request_retries", "Requests that the engine failed on and that ran again", ("model",))
SEGMENTS = Histogram("batchweave_segment_write_seconds", "Writing a segment of answers", buckets=QUICK_S)


def count_answer(model: str, ok: bool, usage: Usage) -> None:
    ANSWERS.labels(model, "completed" if ok else "failed").inc()
    for kind, tokens in (("input", usage.input), ("cached", usage.cached), ("output", usage.output)):
        TOKENS.labels(model, kind).inc(tokens)


@contextmanager
def timed(histogram: Histogram) -> Generator[None, None, None]:
    """Observe how long the block takes, unless it fails."""
    started = perf_counter()
    yield
    histogram.observe(perf_counter() - started)


def serve(host: str, port: int) -> None:
    """All that this process counts at /metrics, from a thread of its own. Raises OSError."""
    start_http_server(port, host, REGISTRY)
