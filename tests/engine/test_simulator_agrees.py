"""The simulator against real SGLang on this CPU, with little KV memory: who is let in when, what is cached, retracted.

Times are not compared: a CPU says nothing about them.
"""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine_process import EngineProcess
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree
from engine_ext.simulate.cache import new_cache
from engine_ext.simulate.engine import new_engine
from engine_ext.simulate.stock import run_stock
from tests.engine.conftest import running_engine

CAPACITY = 3000  # tokens of KV cache
CHUNK = 4096
Requests = list[tuple[list[int], int]]  # token ids of a prompt, output tokens


@dataclass(frozen=True)
class Run:
    order: list[int]
    cached: list[int]
    retractions: int


def workload(name: str) -> Requests:
    generator = np.random.default_rng(5)

    def tokens(count: int) -> list[int]:
        return generator.integers(10, 1000, count).tolist()

    def between(low: int, high: int) -> int:
        return int(generator.integers(low, high))

    if name == "prefixes":  # twelve, of which nine would fit
        shared = [tokens(300) for _ in range(12)]
        return [(shared[between(0, 12)] + tokens(between(10, 60)), between(4, 40)) for _ in range(120)]
    if name == "documents":  # a system prompt, twenty documents in turn
        system = tokens(150)
        shared = [system + tokens(between(200, 500)) for _ in range(20)]
        return [(shared[k % 20] + tokens(between(5, 30)), between(8, 100)) for k in range(120)]
    return [(tokens(between(20, 80)), between(60, 400)) for _ in range(50)]  # long answers


@pytest.fixture(scope="module", params=["fcfs", pytest.param("lpm", marks=pytest.mark.slow)])
def stock(request: pytest.FixtureRequest, demo: Path, log: Path) -> Generator[Any, None, None]:
    options = {
        "max_total_tokens": CAPACITY,
        "schedule_policy": request.param,
        "disable_overlap_schedule": True,
        "max_running_requests": 256,
        "chunked_prefill_size": CHUNK,
    }
    with running_engine(demo, options, log) as engine:
        yield engine, request.param


@pytest.mark.parametrize("name", ["prefixes", "documents", "answers"])
def test_simulator_admits_caches_and_retracts_like_sglang(stock: tuple[EngineProcess[Any], str], name: str) -> None:
    engine, policy = stock
    requests = workload(name)
    real, simulated = engine.do(run_for_real, requests, name), simulate(requests, policy)
    places = np.argsort(real.order) - np.argsort(simulated.order)
    print(
        f"{policy} {name}: {np.count_nonzero(places)} of {len(places)} places differ (most {np.abs(places).max()}), "
        f"cached {sum(simulated.cached)} and {sum(real.cached)}, "
        f"retracted {simulated.retractions} and {real.retractions} (simulated and real)"
    )
    if policy == "fcfs":
        assert simulated.order == real.order
    else:  # prefixes of like length change places, whole groups at a time
        assert np.corrcoef(np.argsort(real.order), np.argsort(simulated.order))[0, 1] > 0.95
    assert sum(simulated.cached) == pytest.approx(sum(real.cached), rel=0.03, abs=10)
    assert simulated.retractions == pytest.approx(real.retractions, rel=0.1, abs=2)


async def run_for_real(host: Any, requests: Requests, name: str) -> Run:
    """All requests wait before the first step, as in a batch."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = host._manager
    await manager.flush_cache()

    async def one(number: int, ids: list[int], output: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": output, "ignore_eos": True, "temperature": 0}
        answer = await host._engine.async_generate(input_ids=ids, sampling_params=sampling, rid=f"{name}-{number}")
        assert answer["meta_info"]["completion_tokens"] == output
        return answer["meta_info"]

    # Through the manager's own method it would hold new requests back itself.
    await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
    tasks = []
    for number, (ids, output) in enumerate(requests):
        tasks.append(asyncio.create_task(one(number, ids, output)))
        await asyncio.sleep(0.005)  # they arrive in this order
    await asyncio.sleep(1)
    await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
    metas = await asyncio.gather(*tasks)
    [found] = await host.scheduler_states()
    order = [int(rid.removeprefix(f"{name}-")) for rid in found["recent_ids"] if rid.startswith(f"{name}-")]
    return Run(
        list(dict.fromkeys(order)),
        [meta["cached_tokens"] for meta in metas],
        sum(meta["num_retractions"] for meta in metas),
    )


def simulate(requests: Requests, policy: str) -> Run:
    prompts = Prompts.of([ids for ids, _ in requests])
    # SGLang's prefill gives the first token, so that one decode step less is to come.
    output = np.array([output - 1 for _, output in requests])
    tree = build_tree(prompts)
    leaf = np.empty(len(requests), dtype=np.int64)
    leaf[tree.order] = tree.leaves
    model = EngineModel(1e-5, 1e-8, 0.0, 1e-3, CAPACITY, clock=Clock.SEQUENTIAL, computes_twice=True)
    engine = new_engine(leaf, prompts.lengths, output)
    cache = new_cache(tree.parent, tree.begin, tree.end, CAPACITY)
    order = np.arange(len(requests))
    found = run_stock(engine, cache, model.numbers, order, output.astype(float), CHUNK, 0.7, policy == "lpm")
    return Run(found.order.tolist(), found.cached.tolist(), int(engine.totals[0].retractions))
