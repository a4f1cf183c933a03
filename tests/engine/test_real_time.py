"""An emulated device in real time: clients measure online requests beside a batch."""

import json
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine.bench_engine import RETUNE, Arriving, BenchEngine
from benchmarks.engine.tuning import PRIORITY, Tuning
from benchmarks.engine_process import EngineProcess
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.options import Emulation, Options, Overlap
from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS

SLOWER = 6.0  # than an H100: this CPU also does what a GPU's host does on cores of its own, and others use it
CHUNK = 8192


def slow_h100() -> CostModel:
    fast = hardware("h100")
    flops = {dtype: each / SLOWER for dtype, each in fast.flops.items()}
    return CostModel(preset("llama-3-8b"), Machine(replace(fast, flops=flops, bandwidth=fast.bandwidth / SLOWER)))


def make(model: str) -> BenchEngine:
    options = Options(slow_h100(), overlap=Overlap.MIXED, emulated=Emulation.REAL, extra_hooks=(RETUNE,))
    arguments = {
        **CPU_DEFAULTS,
        "enable_mixed_chunk": True,
        "max_total_tokens": 40_000,
        "chunked_prefill_size": CHUNK,
        "max_prefill_tokens": CHUNK,
        "context_length": CHUNK,
        "json_model_override_args": json.dumps({"max_position_embeddings": CHUNK}),
    }
    return BenchEngine(model, options, arguments)


@pytest.fixture(scope="module")
def engine(demo: Path, log: Path) -> Generator[EngineProcess[BenchEngine]]:
    with EngineProcess(partial(make, str(demo)), log) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, PRIORITY])
def test_clients_measure_online_requests_beside_a_batch(engine: EngineProcess[BenchEngine], policy: str | None) -> None:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(10, 900, 60).tolist() for _ in range(64)]
    online = [Arriving(0.5 + 0.2 * k, generator.integers(10, 900, 100).tolist(), 20) for k in range(5)]
    # A machine that others use as well may miss the default targets, and then has nothing to lend to the batch.
    tuning = Tuning(policy, CHUNK, ttft_s=60.0, tpot_s=10.0)
    found = engine.do(BenchEngine.run_live, tuning, prompts, [500] * len(prompts), online, 3.0)
    assert found["wall_s"] >= 3.0
    assert found["batch_tokens"] > 0
    for asked, got in zip(online, found["online"], strict=True):
        assert got.generated == asked.output
        assert asked.at_s - 0.01 < got.arrives_s < got.first_s < got.last_s  # a timer may be early by a little
        assert 0 < got.gap_s <= got.last_s - got.first_s
    assert found["scheduling"] == ("sglang" if policy else "dual-scan")
