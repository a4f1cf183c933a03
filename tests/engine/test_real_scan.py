"""The dual scan in real SGLang with a small KV cache, seen through SGLang: whom it lets in, what it finds cached.

Every workload has fixed lengths, and SGLang's own fcfs answers it first: token by token the same.
"""

import asyncio
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine.bench_engine import BenchEngine
from benchmarks.engine.tuning import Tuning
from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.options import Overlap
from tests.engine.conftest import running_bench

CAPACITY = 6_000
CHUNK = 512
Requests = list[tuple[list[int], int]]


async def run_within(engine: BenchEngine, tuning: Tuning, requests: Requests) -> dict[str, Any]:
    async with asyncio.timeout(200):
        return await engine.run(tuning, *prompts_and_outputs(requests))


def prompts_and_outputs(requests: Requests) -> tuple[list[list[int]], list[int]]:
    return [ids for ids, _ in requests], [tokens for _, tokens in requests]


class Real:
    """One engine for all tests of a module, what its steps did, and what it has answered."""

    def __init__(self, engine: EngineProcess[BenchEngine], steps: Path) -> None:
        self.engine, self._steps = engine, steps
        self._found: dict[Any, dict[str, Any]] = {}

    def run(self, policy: str | None, requests: Requests, mixed: bool) -> dict[str, Any]:
        self._steps.unlink(missing_ok=True)
        found = self.engine.do(run_within, Tuning(policy, CHUNK, mixed=mixed), requests)
        steps = [json.loads(line) for line in self._steps.read_text().splitlines()]
        return found | {"steps": steps, "order": [int(rid.split("-")[1]) for rid in found["recent_ids"]]}

    def of_sglang(self, workload: Any) -> dict[str, Any]:
        return self._once("fcfs", workload, mixed=False)

    def of_ours(self, workload: Any, mixed: bool) -> dict[str, Any]:
        return self._once(None, workload, mixed)

    def answers_alone(self, requests: Requests) -> list[list[int]]:
        """Return what SGLang alone answers to these requests; it is asked once."""
        key = json.dumps(requests)
        if key not in self._found:
            self._found[key] = self.run("fcfs", requests, mixed=False)
        return self._found[key]["answers"]

    def _once(self, policy: str | None, workload: Any, mixed: bool) -> dict[str, Any]:
        key = (policy, workload, mixed)
        if key not in self._found:
            self._found[key] = self.run(policy, workload(), mixed)
        return self._found[key]


@contextmanager
def running_real(
    model: Path, log: Path, arguments: dict[str, Any] | None = None, environment: dict[str, str] | None = None
) -> Generator[Real, None, None]:
    steps = log.with_name("steps.jsonl")
    small = {"max_total_tokens": CAPACITY, "chunked_prefill_size": CHUNK, "max_running_requests": 32}
    with running_bench(model, Overlap.MIXED, small | (arguments or {}), log, environment, steps) as engine:
        yield Real(engine, steps)


@pytest.fixture(scope="module")
def real(demo: Path, log: Path) -> Generator[Real, None, None]:
    with running_real(demo, log) as found:
        yield found


def shuffled(requests: Requests) -> Requests:
    return [requests[k] for k in np.random.default_rng(5).permutation(len(requests)).tolist()]


def tokens_of(seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(10, 900, count).tolist()


def both_ends() -> Requests:
    """Prompts with short answers, and short prompts with long ones."""
    tokens = tokens_of(1)
    return shuffled([(tokens(300), 4) for _ in range(60)] + [(tokens(20), 120) for _ in range(40)])


def documents() -> Requests:
    """Five questions to each of twelve documents, of which the cache holds eight, beside long answers."""
    tokens = tokens_of(2)
    found = [(document + tokens(20), 6) for document in [tokens(600) for _ in range(12)] for _ in range(5)]
    return shuffled(found + [(tokens(20), 100) for _ in range(20)])


def growing() -> Requests:
    """Of those that look alike, a third answer twenty times as long: no sample foretells it."""
    tokens = tokens_of(3)
    prefix = tokens(64)
    return [(prefix + tokens(30), 15 if k < 40 else 300) for k in range(60)]


def giant() -> Requests:
    """A prompt that needs nearly the whole cache, among requests whose prefix is worth keeping."""
    tokens = tokens_of(4)
    prefix = tokens(500)
    found = [(prefix + tokens(20), 20) for _ in range(30)]
    return [*found[:15], (tokens(CAPACITY - 200), 8), *found[15:]]


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("workload", [both_ends, documents, growing, pytest.param(giant, marks=pytest.mark.slow)])
def test_answers_are_those_of_sglang_alone(real: Real, workload: Any, mixed: bool) -> None:
    requests = workload()
    theirs, ours = real.of_sglang(workload), real.of_ours(workload, mixed)
    assert ours["answers"] == theirs["answers"]
    assert [len(answer) for answer in ours["answers"]] == [tokens for _, tokens in requests]
    assert ours["overlap"] == ("mixed" if mixed else "none")
    assert ours["admitted"] == len(requests) + ours["retractions"]
    assert ours["admitted_cached_tokens"] == ours["cached_tokens"]
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
    budgets = [step["prefill_tokens"] + step["decoding"] for step in ours["steps"] if step["prefill_tokens"]]
    assert max(budgets) <= CHUNK
    assert any(step["prefill_tokens"] and step["decoding"] for step in ours["steps"]) == mixed


@pytest.mark.parametrize("mixed", [True, False])
def test_both_ends_run_at_once(real: Real, mixed: bool) -> None:
    theirs, ours = real.of_sglang(both_ends), real.of_ours(both_ends, mixed)
    is_long = [tokens > 100 for _, tokens in both_ends()]

    def early(order: list[int]) -> float:
        """Of the long answers, those that are among the first half to be let in."""
        return sum(is_long[number] for number in order[: len(order) // 2]) / sum(is_long)

    assert sorted(ours["order"]) == list(range(len(is_long)))
    assert ours["most_of_both_ends"] > 0
    assert ours["plans"] >= 2  # answers that ended told more than the first plan knew
    if mixed:  # decodes last as long as there are prompts to go beside them
        prefills = [step for step in ours["steps"] if step["prefill_tokens"]]
        assert sum(step["decoding"] > 0 for step in prefills) >= 0.9 * len(prefills)
        assert ours["engine_steps"] < 0.92 * theirs["engine_steps"]
    else:  # a prefill stops decoding, so many must decode together, and begin first
        assert early(ours["order"]) >= 0.9 > 0.6 >= early(theirs["order"])


@pytest.mark.parametrize("mixed", [True, False])
def test_a_document_is_computed_once_though_the_cache_cannot_hold_all(real: Real, mixed: bool) -> None:
    theirs, ours = real.of_sglang(documents), real.of_ours(documents, mixed)
    possible = 12 * 4 * 600
    assert ours["cached_tokens"] >= 0.95 * possible > 1.5 * theirs["cached_tokens"]
    assert ours["expected_cached_tokens"] >= 0.97 * possible
    assert ours["most_pinned"] >= 600


@pytest.mark.parametrize("mixed", [True, False])
def test_whoever_grows_unforeseen_is_retracted_and_goes_on(real: Real, mixed: bool) -> None:
    ours = real.of_ours(growing, mixed)
    assert 0 < ours["retractions"] <= 6
    assert ours["retracted_tokens"] > 0
