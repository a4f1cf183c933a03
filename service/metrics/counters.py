"""Defines the Prometheus metrics that each process keeps of its own work; docs/metrics.md describes every one."""

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

from service.objects.shards import Answer

TOKEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
QUICK_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
LONG_S = (0.01, 0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

HTTP = Histogram(
    "batchweave_http_request_seconds",
    "Time from a request's headers to the last byte of its response, by route template",
    ("method", "route", "status"),
    buckets=QUICK_S,
)
ONLINE_REQUESTS = Counter(
    "batchweave_online_requests", "Online requests, by class and by what came of them", ("model", "tier", "outcome")
)
ONLINE_FIRST_TOKEN = Histogram(
    "batchweave_online_first_token_seconds",
    "Time from a checked online request to the first token of its stream",
    ("model", "tier"),
    buckets=QUICK_S,
)
ONLINE_TOKEN = Histogram(
    "batchweave_online_token_seconds",
    "Mean time per chunk after the first of an online stream, TPOT as the API sees it",
    ("model", "tier"),
    buckets=TOKEN_S,
)
JOBS = Histogram(
    "batchweave_job_seconds", "Duration of planner-role job rounds that found work", ("name",), buckets=LONG_S
)
REFUSED_KEYS = Counter("batchweave_refused_keys", "Keys that were unknown, revoked or expired", ("where",))
JOB_FAILURES = Counter("batchweave_job_failures", "Job rounds that failed and are retried", ("name",))
VALIDATED = Counter("batchweave_validated_requests", "Requests in validated input files")
BATCHES_ENDED = Counter("batchweave_batches_ended", "Batches that this process moved to a final state", ("status",))
DELIVERIES = Counter("batchweave_webhook_deliveries", "Webhook delivery attempts", ("outcome",))
LEASES_EXPIRED = Counter("batchweave_leases_expired", "Slices freed because their workers did not renew their lease")
HANDED_OVER = Counter(
    "batchweave_handed_over_requests", "Requests that a worker handed over before they began, for others", ("model",)
)
SLICES = Counter("batchweave_slices_run", "Slices that workers stopped running", ("model", "outcome"))
ANSWERS = Counter("batchweave_answers", "Answers written to object storage", ("model", "outcome"))
TOKENS = Counter("batchweave_answer_tokens", "Tokens of answers written to object storage", ("model", "kind"))
RETRIES = Counter("batchweave_request_retries", "Retries of requests after the engine failed on them", ("model",))
LOOP_LAG = Histogram(
    "batchweave_loop_lag_seconds", "How much later than due a worker's event loop ran a timer", buckets=LAG_S
)
SEGMENTS = Histogram("batchweave_segment_write_seconds", "Time to write a segment of answers", buckets=QUICK_S)
FLEET_ENGINES = Gauge("batchweave_fleet_engines", "Engines of the fleet, by what they do", ("model", "phase"))
FLEET_WANTED = Gauge("batchweave_fleet_wanted_engines", "Engines that the fleet should have for its work", ("model",))


def count_answer(model: str, answer: Answer) -> None:
    usage = answer.usage
    failed = "not_accepted" if answer.outcome else "failed"
    ANSWERS.labels(model, (answer.outcome or "ok") if answer.ok else failed).inc()
    for kind, tokens in (("input", usage.input), ("cached", usage.cached), ("output", usage.output)):
        TOKENS.labels(model, kind).inc(tokens)


@contextmanager
def timed(histogram: Histogram) -> Generator[None, None, None]:
    """Record how long the block takes, unless it fails."""
    started = perf_counter()
    yield
    histogram.observe(perf_counter() - started)


def serve(host: str, port: int) -> None:
    """Serve this process's metrics at /metrics from a thread of its own. Raises OSError."""
    start_http_server(port, host, REGISTRY)
