"""Embeddings, by the demo model as one that embeds: real SGLang."""

import asyncio
import base64
import json
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from service.demo.model import NAME, ensure_demo_model
from service.demo.prompts import corpus
from tests.engine.conftest import RealEngine, running_engine

VOCABULARY = 4096


async def ask(engine: RealEngine, endpoint: str, body: dict[str, Any], rid: str = "") -> Any:
    """The answer's JSON body, with its status under `status_code`."""
    rid = rid or f"test-{random.getrandbits(64):016x}"
    answer = await engine.host.run(endpoint, {"model": NAME, **body}, rid, "kind")
    return {**json.loads(answer.body), "status_code": answer.status_code, "aborted": answer.aborted}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealEngine, None, None]:
    model = ensure_demo_model(tmp_path_factory.mktemp("model") / "demo", corpus())
    with running_engine(model, NAME, {"is_embedding": True, "max_running_requests": 32}) as running:
        yield running


def test_embeddings(embedder: RealEngine) -> None:
    assert embedder.host.endpoints == ["/v1/embeddings"]

    async def run() -> None:
        one = await ask(embedder, "/v1/embeddings", {"input": "The sea is blue."})
        assert (one["status_code"], one["object"], one["model"]) == (200, "list", NAME)
        assert one["usage"]["prompt_tokens"] > 3
        vector = np.array(one["data"][0]["embedding"])
        assert np.linalg.norm(vector) == pytest.approx(1, abs=0.02)
        many = await ask(
            embedder, "/v1/embeddings", {"input": ["The sea is blue.", "x"] * 20, "encoding_format": "base64"}
        )
        assert [each["index"] for each in many["data"]] == list(range(40))
        again = np.frombuffer(base64.b64decode(many["data"][2]["embedding"]), dtype=np.float32)
        np.testing.assert_allclose(again, vector, atol=1e-6)
        ids = await ask(embedder, "/v1/embeddings", {"input": [[5, 6, 7], [8]]})
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
            found = await ask(embedder, "/v1/embeddings", refused)
            assert (found["status_code"], bool(found["error"]["message"])) == (400, True), refused
        for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/score"):
            body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
            assert (await ask(embedder, endpoint, body))["status_code"] == 400
        fine = await ask(embedder, "/v1/embeddings", {"input": "The sea is blue."})
        np.testing.assert_allclose(fine["data"][0]["embedding"], vector, atol=1e-6)

    embedder.do(run())


def test_an_aborted_embedding_is_no_answer(embedder: RealEngine) -> None:
    async def run() -> None:
        long = [f"{n} " + "word " * 2000 for n in range(60)]
        task = asyncio.create_task(ask(embedder, "/v1/embeddings", {"input": long}, rid="gone"))
        await asyncio.sleep(0.5)
        embedder.host.abort("gone")
        assert (await asyncio.wait_for(task, 60))["aborted"]

    embedder.do(run())


def test_an_online_embedding_is_that_of_a_batch_and_ends_when_nobody_waits(embedder: RealEngine) -> None:
    async def run() -> None:
        body = {"model": NAME, "input": "The sea is blue."}
        online = await embedder.host.serve("/v1/embeddings", body, "embd-online")
        of_batch = await ask(embedder, "/v1/embeddings", {"input": "The sea is blue."})
        assert json.loads(online.body)["data"] == of_batch["data"]
        long = [f"{n} " + "word " * 2000 for n in range(60)]
        task = asyncio.create_task(embedder.host.serve("/v1/embeddings", {**body, "input": long}, "embd-left"))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert embedder.host.step_age_s == 0.0, "nothing counts as in flight"
        assert (await ask(embedder, "/v1/embeddings", {"input": "x"}))["status_code"] == 200

    embedder.do(run())
