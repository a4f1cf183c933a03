"""Figures of the API and of the jobs, as Prometheus reads them."""

import httpx
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.db.sessions import Database
from service.queue.progress import Heartbeat
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and sorted values of the labels."""
    return {
        (each.name, tuple(each.labels[name] for name in sorted(each.labels))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


async def test_the_api_says_what_waits_and_how_long_it_answers(
    harness: Harness, settings: Settings, clock: Clock
) -> None:
    await harness.submit(jsonl(line(n) for n in range(20)), window_s=3600)
    await harness.plan()
    await harness.submit(jsonl(line(n) for n in range(4)))
    await Heartbeat(harness.redis).beat("worker-a", {"name": "worker-a", "model": "test-model"})
    clock.now += 60
    with serve(settings, clock) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            before = samples((await client.get("/metrics")).text)
            for path in ("/v1/batches/batch_x", "/v1/batches/batch_y", "/nowhere/at/all"):
                assert (await client.get(path)).status_code == 404
            after = samples((await client.get("/metrics")).text)
    assert after["batchweave_batches", ("in_progress",)] == 1
    assert after["batchweave_batches", ("validating",)] == 1
    assert after["batchweave_slices", ("test-model", "ready")] == 3
    assert after["batchweave_unfinished_requests", ("test-model",)] == 20
    assert after["batchweave_queue_oldest_seconds", ("test-model",)] == 60
    assert after["batchweave_deadline_seconds", ("test-model",)] == 3540
    assert after["batchweave_workers", ("test-model",)] == 1
    name = "batchweave_http_request_seconds_count"
    template = ("GET", "/v1/batches/{batch_id}", "404")
    assert after[name, template] - before.get((name, template), 0) == 2
    unknown = ("GET", "other", "404")  # a path that anyone can invent is no label
    assert after[name, unknown] - before.get((name, unknown), 0) == 1


def test_metrics_are_for_operators(settings: Settings, clock: Clock) -> None:
    with serve(settings.model_copy(update={"auth": "keys"}), clock) as url:
        assert httpx.get(f"{url}/metrics").status_code == 401


async def test_a_worker_counts_durable_answers_and_their_tokens(harness: Harness, database: Database) -> None:
    def now() -> dict[tuple[str, tuple[str, ...]], float]:
        return samples(generate_latest(REGISTRY).decode())

    before = now()
    batch_id = await harness.submit(jsonl(line(n) for n in range(12)))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 3": [500], "request 4": [400]})):
        await harness.until_ended(batch_id)
    after = now()

    def more(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert more("batchweave_answers_total", "test-model", "ok") == 11
    assert more("batchweave_answers_total", "test-model", "failed") == 1
    assert more("batchweave_answer_tokens_total", "output", "test-model") == 22
    assert more("batchweave_answer_tokens_total", "cached", "test-model") == 44
    assert more("batchweave_request_retries_total", "test-model") == 1
    assert more("batchweave_slices_run_total", "test-model", "finished") == 2
    assert more("batchweave_validated_requests_total") == 12
