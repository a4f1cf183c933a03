"""Fifty clients at once, two API processes, three workers: no 5xx, no lost update, no page with a hole."""

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from service.db.migrate import upgrade
from service.settings import load_settings
from tests.conftest import new_postgres_database
from tests.faults import roles
from tests.faults.deployment import CHAT, ENDED, forkserver
from tests.faults.roles import Config
from tests.integration.harness import demo_tokenizer

CLIENTS, BATCHES = 50, 2


@dataclass
class Crowd:
    """What all clients together have made; cancelled ones may still complete."""

    urls: list[str]
    files: set[str] = field(default_factory=set[str])
    batches: dict[str, int] = field(default_factory=dict[str, int])  # with how many requests
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, rng: random.Random) -> openai.OpenAI:
        # No retries: every 5xx and every lost connection is a failure of the test.
        return openai.OpenAI(base_url=f"{rng.choice(self.urls)}/v1", api_key="k", max_retries=0, timeout=120)

    def behave(self, number: int) -> None:
        """Upload, create, list, look and cancel, each call at either API process."""
        rng = random.Random(number)
        for _ in range(BATCHES):
            count = rng.randrange(1, 40)
            lines = [
                {
                    "custom_id": f"id-{n}",
                    "method": "POST",
                    "url": CHAT,
                    "body": {"model": "test-model", "messages": [{"role": "user", "content": f"{number} {n}"}]},
                }
                for n in range(count)
            ]
            data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
            file = self.client(rng).files.create(file=("in.jsonl", data), purpose="batch")
            create: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            batch = self.client(rng).batches.create(**create)
            with self.lock:
                self.files.add(file.id)
                self.batches[batch.id] = count
            if rng.random() < 0.3:
                try:
                    self.client(rng).batches.cancel(batch.id)
                except openai.BadRequestError as error:
                    if error.code != "batch_not_cancellable":  # it was faster
                        raise
            with self.lock:
                before = set(self.batches)
            listed = [each.id for each in self.client(rng).batches.list(limit=7)]
            assert len(listed) == len(set(listed))
            assert before <= set(listed), "a batch that was there is on no page"


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_crowd_loses_nothing(tmp_path: Path, postgres: Any, redis_url: str) -> None:
    url = new_postgres_database(postgres)
    upgrade(url)
    settings = load_settings(
        data_dir=tmp_path / "data",
        database_url=url,
        redis_url=redis_url,
        model=str(demo_tokenizer(tmp_path / "model")),
        model_name="test-model",
        slice_requests=16,
        poll_s=0.05,
        flush_s=0.05,
    )
    context, processes, urls = forkserver(), list[Any](), list[str]()
    for name in ("api-1", "api-2", "planner", "worker-1", "worker-2", "worker-3"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = Config(settings.model_copy(update={"worker_name": name, "port": port}), tmp_path)
        processes.append(context.Process(target=getattr(roles, name.partition("-")[0]), args=(config,), daemon=True))
        processes[-1].start()
        if name.startswith("api"):
            urls.append(f"http://127.0.0.1:{port}")
            openai.OpenAI(base_url=f"{urls[-1]}/v1", api_key="k", max_retries=20).files.list()  # until it is up
    crowd = Crowd(urls)
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(crowd.behave, range(CLIENTS)))
        client = crowd.client(random.Random(0))
        for batch_id, count in crowd.batches.items():
            batch = client.batches.retrieve(batch_id)
            while batch.status not in ENDED:
                batch = client.batches.retrieve(batch_id)
            counts = batch.request_counts
            assert counts is not None
            answers = [
                json.loads(line)
                for file_id in (batch.output_file_id, batch.error_file_id)
                if file_id
                for line in client.files.content(file_id).text.splitlines()
            ]
            not_run = [each for each in answers if (each["error"] or {}).get("code") == "batch_cancelled"]
            assert len(answers) == len({each["custom_id"] for each in answers}) == counts.total
            assert counts.completed + counts.failed + len(not_run) == counts.total
            assert counts.total in ({count} if batch.status == "completed" else {0, count})
        assert crowd.files <= {each.id for each in client.files.list(limit=11)}
    finally:
        for process in processes:
            process.kill()
            process.join()
