"""What a user sees: two endpoints, every answer once, clear errors, and crashes that lose nothing. Real SGLang."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.demo.prompts import CHAT, COMPLETIONS, requests
from tests.acceptance.crowd import FULL, Crowd
from tests.acceptance.service import Up

MODEL = "batchweave-demo"
DEMO = requests(MODEL)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[Up, None, None]:
    service = Up.on(tmp_path_factory.mktemp("up") / "data")
    service.start()
    service.until_engine()
    yield service
    if service.process is not None and service.process.poll() is None:
        assert service.stop() == 0


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me about {custom_id}."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**body, **changes}}


def long_lines(prefix: str, count: int) -> list[dict[str, Any]]:
    """Requests that keep the engine busy for a while."""
    return [line(f"{prefix}-{n}", max_tokens=60, ignore_eos=True) for n in range(count)]


def test_demo_batches_finish_and_their_books_agree(up: Up) -> None:
    ids = {endpoint: up.submit(lines, endpoint, metadata={"kind": "demo"}) for endpoint, lines in DEMO.items()}
    assert sum(len(lines) for lines in DEMO.values()) >= 200
    cached, reasons = 0, Counter[str]()
    for endpoint, batch_id in ids.items():
        batch = up.wait(batch_id)
        assert (batch.status, batch.model, batch.endpoint) == ("completed", MODEL, endpoint)
        assert batch.error_file_id is None
        lines = up.lines(batch.output_file_id)
        assert set(lines) == {each["custom_id"] for each in DEMO[endpoint]}
        bodies = [each["response"]["body"] for each in lines.values()]
        assert {each["response"]["status_code"] for each in lines.values()} == {200}
        reasons.update(choice["finish_reason"] for body in bodies for choice in body["choices"])
        counts, usage = batch.request_counts, batch.usage
        assert counts is not None
        assert usage is not None
        assert (counts.total, counts.completed, counts.failed) == (len(lines), len(lines), 0)
        assert usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
        assert usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        details = [body["usage"]["prompt_tokens_details"] or {} for body in bodies]
        assert usage.input_tokens_details.cached_tokens == sum(each.get("cached_tokens", 0) for each in details)
        cached += usage.input_tokens_details.cached_tokens
        assert batch.completed_at is not None
        assert batch.in_progress_at is not None
        assert batch.created_at <= batch.in_progress_at <= batch.completed_at
    assert cached > 0
    assert reasons.keys() == {"stop", "length"}  # as of a real model: most long answers end by themselves
    assert reasons["stop"] >= 20
    story = up.lines(up.client.batches.retrieve(ids[COMPLETIONS]).output_file_id)["story-1"]
    assert story["response"]["body"]["object"] == "text_completion"


LONG = {"role": "user", "content": "word " * 9000}


def test_online_requests_are_answered_while_a_batch_runs(up: Up) -> None:
    lines = long_lines("beside", 600)
    batch_id = up.submit(lines)
    up.until(lambda: up.done(batch_id) > 0, "the batch to run")
    asked: Any = {"model": MODEL, "messages": lines[0]["body"]["messages"], "max_tokens": 8, "temperature": 0}
    streamed = [
        "".join(
            chunk.choices[0].delta.content or "" for chunk in up.client.chat.completions.create(**asked, stream=True)
        )
        for _ in range(3)
    ]
    whole = up.client.chat.completions.create(**asked).choices[0].message.content
    assert up.client.batches.cancel(batch_id).status == "cancelling", "they waited until the batch ended"
    assert set(streamed) == {whole}
    batch = up.wait(batch_id)
    answers, errors = up.lines(batch.output_file_id), up.lines(batch.error_file_id)
    assert len(answers) + len(errors) == len(lines)
    assert {*answers, *errors} == {each["custom_id"] for each in lines}


def test_a_crowd_of_online_clients_harms_no_batch(up: Up) -> None:
    """Many at once, many that leave, many choices: every stream ends, and so does all that nobody waits for."""
    crowd = Crowd(up.url, MODEL)
    lines = long_lines("crowd", 60)
    batch_id = up.submit(lines)
    ended = asyncio.run(crowd.stream(200, 8))
    assert ended.total() == 200
    assert ended.keys() <= {FULL, "overloaded"}  # a machine under load refuses those that would be late
    assert ended[FULL] >= 20
    assert asyncio.run(crowd.choices(64)) == (64, 64)
    huge = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (8 * 2**20 - 300)}]}
    assert httpx.post(up.url + CHAT, json=huge, timeout=60).json()["error"]["code"] == "context_length_exceeded"
    asyncio.run(crowd.hang_up(200))
    up.until(lambda: up.worker_state()["online_requests"] == 0, "those who left to be forgotten")
    batch = up.wait(batch_id)
    assert set(up.lines(batch.output_file_id)) == {each["custom_id"] for each in lines}
    up.until(lambda: up.worker_state()["state"] == "idle", "the engine to rest")


@pytest.mark.slow
def test_streams_of_a_killed_worker_end_with_an_error(up: Up) -> None:
    lines = long_lines("killed", 60)
    batch_id = up.submit(lines)

    async def run() -> Counter[str]:
        streams = asyncio.create_task(Crowd(up.url, MODEL).stream(20, 600))
        async with asyncio.timeout(120):
            while not up.worker_state()["online_requests"]:
                await asyncio.sleep(0.1)
        up.worker().send_signal(signal.SIGKILL)
        return await streams

    ended = asyncio.run(run())
    assert ended.total() == 20
    assert ended.keys() <= {FULL, "worker_lost", "no_worker", "overloaded"}
    assert ended[FULL] < 20
    batch = up.wait(batch_id)
    assert set(up.lines(batch.output_file_id)) == {each["custom_id"] for each in lines}


def test_responses_and_scores_run_as_batches(up: Up) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "Name a colour.", "max_output_tokens": 4},
        "/v1/score": {"query": "Is it blue?", "items": ["The sea", "Fire"], "label_token_ids": [5, 6]},
    }
    for url, body in bodies.items():
        lines = [
            {"custom_id": f"a-{n}", "method": "POST", "url": url, "body": {"model": MODEL, **body}} for n in range(20)
        ]
        batch = up.wait(up.submit(lines, url, extra_body={"batchweave": {"output_order": "input"}}))
        assert (batch.status, batch.error_file_id) == ("completed", None)
        answers = up.lines(batch.output_file_id)
        assert list(answers) == [line["custom_id"] for line in lines]
        usage = batch.usage
        assert usage is not None
        found = [answer["response"]["body"]["usage"] for answer in answers.values()]
        assert usage.input_tokens == sum(each.get("input_tokens") or each["prompt_tokens"] for each in found)
        told = sum(each.get("output_tokens") or each.get("completion_tokens") or 0 for each in found)
        assert usage.output_tokens == told
        assert (usage.output_tokens > 0) == (url == "/v1/responses")


def test_a_batch_for_what_its_model_cannot_do_fails_at_once(up: Up) -> None:
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": "x"}}]
    batch = up.wait(up.submit(lines, "/v1/embeddings"))
    assert batch.errors is not None
    [error] = batch.errors.data or []
    assert (batch.status, error.code, error.line) == ("failed", "invalid_url", 1)
    assert "/v1/chat/completions" in (error.message or "")


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (json.dumps(line("a")).encode() + b"\nnot json\n", "invalid_json_line", 2),
        (b"".join(json.dumps(line(each)).encode() + b"\n" for each in "aba"), "duplicate_custom_id", 3),
        (json.dumps({**line("a"), "url": "/v1/moderations"}).encode(), "invalid_url", 1),
        (json.dumps({**line("a"), "url": COMPLETIONS}).encode(), "url_mismatch", 1),
        (b"\n", "empty_file", None),
        (json.dumps(line("a", model="gpt-unknown")).encode(), "model_not_found", 1),
    ],
)
def test_bad_file_fails_with_code_and_line(up: Up, data: bytes, code: str, number: int | None) -> None:
    batch = up.wait(up.submit(data))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert batch.errors.data[0].message


def test_request_that_sglang_refuses_is_one_error_line(up: Up) -> None:
    lines = [line("good-1"), line("bad", temperature=-3), line("odd", top_p=7), line("long", messages=[LONG])]
    batch = up.wait(up.submit([*lines, line("good-2")]))
    assert batch.status == "completed"
    assert set(up.lines(batch.output_file_id)) == {"good-1", "good-2"}
    errors = up.lines(batch.error_file_id)
    assert {each["response"]["status_code"] for each in errors.values()} == {400}
    told = {key: each["response"]["body"]["error"] for key, each in errors.items()}
    assert {key: (each["code"], each["param"]) for key, each in told.items()} == {
        "bad": ("invalid_request", "temperature"),
        "odd": ("invalid_request", "top_p"),
        "long": ("context_length_exceeded", "messages"),
    }
    assert "temperature" in told["bad"]["message"]
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)


def test_token_ids_outside_the_vocabulary_do_not_kill_the_engine(up: Up) -> None:
    body = {"model": MODEL, "max_tokens": 2}
    lines = [
        {"custom_id": key, "method": "POST", "url": COMPLETIONS, "body": {**body, "prompt": prompt}}
        for key, prompt in (("outside", [1, 10**6]), ("nested", [[1], [-5]]), ("inside", [7, 8, 9]))
    ]
    worker = up.worker().pid
    batch = up.wait(up.submit(lines, COMPLETIONS))
    assert set(up.lines(batch.error_file_id)) == {"outside", "nested"}
    assert set(up.lines(batch.output_file_id)) == {"inside"}
    assert up.worker().pid == worker


def test_cancel_stops_within_seconds_and_keeps_what_is_done(up: Up) -> None:
    batch_id = up.submit(long_lines("cancel", 400))
    up.until(lambda: up.done(batch_id) >= 20, "some answers")
    assert up.client.batches.cancel(batch_id).status == "cancelling"
    asked = time.monotonic()
    batch = up.wait(batch_id)
    assert time.monotonic() - asked < 10
    assert batch.status == "cancelled"
    output, errors = up.lines(batch.output_file_id), up.lines(batch.error_file_id)
    assert len(output) >= 20
    assert set(output) | set(errors) == {f"cancel-{n}" for n in range(400)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    quick = up.wait(up.submit([line("after-cancel")]))  # the engine is free again
    assert quick.status == "completed"
    assert "slice failed" not in (up.folder / "logs" / "worker.log").read_text()


def test_openapi_and_models_are_served(up: Up) -> None:
    assert [model.id for model in up.client.models.list()] == [MODEL]
    assert httpx.get(f"{up.url}/openapi.json").json()["info"]["title"] == "batchweave"
    assert httpx.get(f"{up.url}/docs").status_code == 200


def test_second_service_on_the_same_folder_is_refused(up: Up) -> None:
    command = [sys.executable, "-m", "batchweave", "up", "--data-dir", str(up.folder)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "is already running on" in second.stderr
    assert httpx.get(f"{up.url}/readyz").status_code == 200


def test_taken_port_is_said_at_once(up: Up, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "batchweave", "up", "--data-dir", str(tmp_path / "d"), "--port", str(up.port)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"port {up.port} is taken" in " ".join(second.stderr.split())


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; an orphan that has exited and that nobody has reaped does not."""
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def assert_whole(up: Up, batch_id: str, prefix: str, count: int, before: dict[str, str]) -> None:
    """The batch completes with every line once, and what was answered `before` still is that very answer."""
    batch = up.wait(batch_id)
    assert batch.status == "completed"
    output = up.lines(batch.output_file_id)
    assert set(output) == {f"{prefix}-{n}" for n in range(count)}
    assert batch.error_file_id is None
    kept = {key: value for key, value in before.items() if key in output}
    assert len(kept) >= 30
    assert {key: output[key]["id"] for key in kept} == kept


def test_redis_emptied_in_the_middle_loses_nothing(up: Up) -> None:
    batch_id = up.submit(long_lines("wiped", 300))
    up.until(lambda: up.done(batch_id) >= 40, "some answers")
    before = up.answers_on_disk()
    up.redis.flushall()
    assert_whole(up, batch_id, "wiped", 300, before)


def test_worker_killed_in_the_middle_loses_nothing(up: Up) -> None:
    batch_id = up.submit(long_lines("worker", 400))
    up.until(lambda: up.done(batch_id) >= 40, "some answers")
    worker = up.worker()
    before = up.answers_on_disk()
    engine = worker.children(recursive=True)
    worker.send_signal(signal.SIGKILL)
    psutil.wait_procs(engine, 20)
    assert alive(engine) == []  # no orphan holds the device
    assert up.client.batches.retrieve(batch_id).status == "in_progress"
    assert_whole(up, batch_id, "worker", 400, before)


@pytest.mark.slow
def test_everything_killed_and_started_again_goes_on(up: Up) -> None:
    batch_id = up.submit(long_lines("all", 400))
    up.until(lambda: up.done(batch_id) >= 40, "some answers")
    family = up.family()
    for process in family:
        process.send_signal(signal.SIGKILL)
    assert up.process is not None
    up.process.wait(20)
    psutil.wait_procs(family, 20)
    before = up.answers_on_disk()
    up.start()
    assert_whole(up, batch_id, "all", 400, before)


def test_sigterm_stops_cleanly_and_leaves_no_process(up: Up) -> None:
    """Within what container runtimes give, ten seconds on a machine that is not busy (`benchmarks.idle`)."""
    batch_id = up.submit(long_lines("stopped", 200))
    up.until(lambda: up.done(batch_id) >= 10, "some answers")
    family = up.family()
    assert up.stop(signal.SIGTERM, within_s=30) == 0
    assert alive(family) == []
    with closing(sqlite3.connect(up.folder / "batchweave.db")) as database:
        mine = "SELECT slice_id FROM slice_batches WHERE batch_id = ?"
        query = f"SELECT status, count(*) FROM slices WHERE status != 'done' AND id IN ({mine}) GROUP BY status"
        left = dict(database.execute(query, [batch_id]))
    assert set(left) == {"ready"}  # what was not answered waits for the next start, leased to nobody
