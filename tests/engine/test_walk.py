"""A step looks once, decides once and applies once, whatever it does."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine.walk import PHASES, returns
from service.demo.prompts import CHAT
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine

MOST_RETURNS = 10


def body(words: int, tokens: int) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": "tell me more " * words}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }


async def both(host: Any) -> list[list[str]]:
    """Run a batch beside online requests; return the walks of all steps with requests of the batch."""
    batch = [host.run(CHAT, body(40 * (n % 3 + 1), 24), f"batch-{n}", "a batch") for n in range(12)]
    tasks = [asyncio.create_task(each) for each in batch]
    await asyncio.sleep(0.2)
    for number in range(6):
        await host.serve(CHAT, body(30, 6), f"online-{number}")
    await asyncio.gather(*tasks)
    [state] = await host._manager.get_internal_state()
    return state["batchweave_walks"]


def test_a_step_looks_decides_and_applies_once(demo: Path, tmp_path: Path) -> None:
    arguments = {"max_total_tokens": 2000, "chunked_prefill_size": 256}
    with running_engine(demo, arguments, tmp_path / "log", extra_hooks=("benchmarks.engine.walk",)) as engine:
        walks = engine.do(both)
    assert len(walks) > 20
    for walk in walks:
        assert [each for each in walk if each in PHASES] == list(PHASES), walk
        assert returns(walk) <= MOST_RETURNS, walk
