"""How much of a prompt a step has on a CPU."""

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS, LEAST_CHUNK, chunk_for

MOST = CPU_DEFAULTS["chunked_prefill_size"]


def test_a_larger_model_gets_smaller_steps() -> None:
    assert chunk_for(1e3, 1) == MOST  # the tiny model, on any machine
    assert chunk_for(1e15, 1) == LEAST_CHUNK
    chunk = chunk_for(135e6, 1)
    assert LEAST_CHUNK <= chunk < MOST
    assert chunk.bit_count() == 1
