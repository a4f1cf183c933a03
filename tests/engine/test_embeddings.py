"""Embeddings, by the demo model as one that embeds: real SGLang."""

import asyncio
import base64
import json
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine_process import EngineProcess
from service.demo.tiny import NAME
from tests.engine.conftest import held_aside, running_engine

VOCABULARY = 4096


async def ask(host: Any, endpoint: str, body: dict[str, Any], rid: str = "") -> Any:
    """The answer's JSON body, with its status under `status_code`."""
    rid = rid or f"test-{random.getrandbits(64):016x}"
    answer = await host.run(endpoint, {"model": NAME, **body}, rid, "kind")
    return {**json.loads(answer.body), "status_code": answer.status_code, "aborted": answer.aborted}


@pytest.fixture(scope="module")
def embedder(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    with running_engine(demo, {"is_embedding": True, "max_running_requests": 32}, log) as running:
        yield running


def test_embeddings(embedder: EngineProcess[Any]) -> None:
    async def run(host: Any) -> None:
        assert host.endpoints == ["/v1/embeddings"]
        one = await ask(host, "/v1/embeddings", {"input": "The sea is blue."})
        assert (one["status_code"], one["object"], one["model"]) == (200, "list", NAME)
        assert one["usage"]["prompt_tokens"] > 3
        vector = np.array(one["data"][0]["embedding"])
        assert np.linalg.norm(vector) == pytest.approx(1, abs=0.02)
        many = await ask(host, "/v1/embeddings", {"input": ["The sea is blue.", "x"] * 20, "encoding_format": "base64"})
        assert [each["index"] for each in many["data"]] == list(range(40))
        again = np.frombuffer(base64.b64decode(many["data"][2]["embedding"]), dtype=np.float32)
        np.testing.assert_allclose(again, vector, atol=1e-6)
        ids = await ask(host, "/v1/embeddings", {"input": [[5, 6, 7], [8]]})
        assert len(ids["data"]) == 2
        for refused in (
            {"input": ""},
            {"input": []},
            {"input": [[]]},
            {"input": [[5], []]},
            {"input": [VOCABULARY]},
            {"input": [[-1]]},
            {"input": [[2**70]]},
            {"input": "word " * 20_000},
            {"input": "x", "embed_overrides": [[[0.0]]], "embed_override_token_id": 5},
            {"input": "x", "dimensions": 7},
            {"input": {"a": 1}},
            {"input": [{"image": "file:///etc/passwd"}]},
            {"input": [{"text": "word " * 20_000}]},
        ):
            found = await ask(host, "/v1/embeddings", refused)
            assert (found["status_code"], bool(found["error"]["message"])) == (400, True), refused
        for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/score"):
            body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
            assert (await ask(host, endpoint, body))["status_code"] == 400
        fine = await ask(host, "/v1/embeddings", {"input": "The sea is blue."})
        np.testing.assert_allclose(fine["data"][0]["embedding"], vector, atol=1e-6)

    embedder.do(run)


def test_an_aborted_embedding_is_no_answer(embedder: EngineProcess[Any]) -> None:
    async def run(host: Any) -> None:
        long = [f"{n} " + "word " * 2000 for n in range(60)]
        task = asyncio.create_task(ask(host, "/v1/embeddings", {"input": long}, rid="gone"))
        async with asyncio.timeout(60):
            while "gone_59" not in host._manager.rid_to_state:
                await asyncio.sleep(0.01)
        host.abort("gone")
        assert (await asyncio.wait_for(task, 60))["aborted"]
        with held_aside():
            task = asyncio.create_task(ask(host, "/v1/embeddings", {"input": long}, rid="unsent"))
            await asyncio.sleep(0.1)
            assert not task.done()
            host.abort("unsent")
        assert (await asyncio.wait_for(task, 60))["aborted"]

    embedder.do(run)


def test_an_online_embedding_is_that_of_a_batch_and_ends_when_nobody_waits(embedder: EngineProcess[Any]) -> None:
    async def run(host: Any) -> None:
        body = {"model": NAME, "input": "The sea is blue."}
        online = await host.serve("/v1/embeddings", body, "embd-online")
        of_batch = await ask(host, "/v1/embeddings", {"input": "The sea is blue."})
        assert json.loads(online.body)["data"] == of_batch["data"]
        long = [f"{n} " + "word " * 2000 for n in range(45)]
        task = asyncio.create_task(host.serve("/v1/embeddings", {**body, "input": long}, "embd-left"))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert host.step_age_s == 0.0, "nothing counts as in flight"
        assert (await ask(host, "/v1/embeddings", {"input": "x"}))["status_code"] == 200

    embedder.do(run)
