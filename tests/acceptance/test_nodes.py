"""One engine on two nodes: two `batchweave worker` processes with SGLang's tensor-parallel ranks on the CPU."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from service.db.migrate import upgrade
from service.demo.prompts import corpus
from service.demo.tiny import NAME, ensure_tiny_model
from service.settings import load_settings
from tests.engine.conftest import running_engine
from tests.hostile.server import redis_server, running

pytest.importorskip("sglang")

REQUESTS = 36
ARGUMENTS = {
    "enable_deterministic_inference": True,
    "tp_size": 2,
    "max_total_tokens": 20_000,
    "max_running_requests": 8,
}


def lines(salt: str) -> list[dict[str, Any]]:
    def body(number: int) -> dict[str, Any]:
        prompt = f"{salt} part {number % 5} " * 12 + f"question {number}"
        more = {"max_tokens": 10 + number % 15, "temperature": 0, "ignore_eos": True}
        return {"model": NAME, "prompt": prompt, **more}

    about = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": f"{number}", **about, "body": body(number)} for number in range(REQUESTS)]


@dataclass
class Deployment:
    """A service without workers, in which the test starts those it wants."""

    folder: Path
    variables: dict[str, str]
    client: openai.OpenAI
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def start(self, name: str, **more: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.variables, "BATCHWEAVE_WORKER_NAME": name, **more}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "batchweave", "worker"]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def nodes(self) -> list[subprocess.Popen[bytes]]:
        """Both nodes of one engine, the leader first."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            leader = f"127.0.0.1:{free.getsockname()[1]}"
        told = {"BATCHWEAVE_NODES": "2", "BATCHWEAVE_LEADER": leader}
        return [self.start(f"node-{rank}", BATCHWEAVE_NODE_RANK=str(rank), **told) for rank in range(2)]

    def workers(self) -> list[dict[str, Any]]:
        return self.client.get("/workers", cast_to=object)["data"]  # type: ignore[index]

    def until(self, condition: Callable[[], bool], limit_s: float = 600) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "\n".join(
                f"{path.name}: {path.read_text()[-3000:]}" for path in self.folder.glob("*.log")
            )
            time.sleep(0.1)

    def submit(self, salt: str) -> str:
        data = b"".join(json.dumps(each).encode() + b"\n" for each in lines(salt))
        file = self.client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = self.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        return batch.id

    def answers(self, batch_id: str) -> dict[int, str]:
        """Wait for the batch, and return its answers by custom_id; one that has two fails the test."""
        self.until(lambda: self.client.batches.retrieve(batch_id).status == "completed")
        batch = self.client.batches.retrieve(batch_id)
        assert batch.error_file_id is None
        lines = self.client.files.content(batch.output_file_id or "").text.splitlines()
        assert len(lines) == REQUESTS
        found = [json.loads(each) for each in lines]
        texts = {int(each["custom_id"]): each["response"]["body"]["choices"][0]["text"] for each in found}
        return dict(sorted(texts.items()))

    def stop_all(self) -> None:
        for process in self.processes:
            family = []
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


@contextmanager
def open_deployment(folder: Path) -> Generator[Deployment]:
    """Run Redis, the API and the planner until the end of the block."""
    database_url = f"sqlite:///{folder / 'batchweave.db'}"
    upgrade(load_settings(database_url=database_url).database)
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(folder))
        variables = {
            "BATCHWEAVE_MODEL": str(ensure_tiny_model(folder / "model", corpus())),
            "BATCHWEAVE_MODEL_NAME": NAME,
            "BATCHWEAVE_ENGINE_ARGS": json.dumps(ARGUMENTS),
            "BATCHWEAVE_LEASE_S": "4",
            "BATCHWEAVE_DATABASE_URL": database_url,
            "BATCHWEAVE_REDIS_URL": redis_url,
            "BATCHWEAVE_DATA_DIR": str(folder / "data"),
            "BATCHWEAVE_SLICE_REQUESTS": "12",
        }
        api = stack.enter_context(running("api", folder, database_url, redis_url, variables=variables))
        stack.enter_context(running("planner", folder, database_url, redis_url, variables=variables))
        client = stack.enter_context(openai.OpenAI(base_url=f"{api.url}/v1", api_key="none"))
        found = Deployment(folder, variables, client)
        stack.callback(found.stop_all)
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_on_two_nodes_answers_as_on_one_and_outlives_its_nodes(tmp_path: Path) -> None:
    with open_deployment(tmp_path) as deployment:
        leader, follower = deployment.nodes()
        deployment.until(lambda: [each["state"] for each in deployment.workers()] == ["idle"])
        [worker] = deployment.workers()
        assert (worker["id"], worker["followers"]) == ("node-0", [socket.gethostname()])
        on_two = deployment.answers(deployment.submit("same"))

        batch_id = deployment.submit("killed")
        deployment.until(lambda: deployment.client.batches.retrieve(batch_id).request_counts.completed > 0)  # type: ignore[union-attr]
        os.killpg(follower.pid, signal.SIGKILL)
        leader.wait(120)
        leader, follower = deployment.nodes()  # as Kubernetes starts the group again
        deployment.answers(batch_id)

        leader.terminate()
        assert leader.wait(60) == 0
        assert follower.wait(60) == 0, "it ends with its leader"

    with running_engine(tmp_path / "model", ARGUMENTS, tmp_path / "alone.log") as alone:
        assert alone.do(answers_alone, [each["body"] for each in lines("same")]) == list(on_two.values())


async def answers_alone(host: Any, bodies: list[dict[str, Any]]) -> list[str]:
    """What one engine alone answers to these requests."""
    found = await asyncio.gather(*(host.run("/v1/completions", body, f"c-{k}", "k") for k, body in enumerate(bodies)))
    return [json.loads(answer.body)["choices"][0]["text"] for answer in found]
