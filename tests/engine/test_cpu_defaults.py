"""In which dtype a CPU computes, and how much of a prompt a step has."""

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS, LEAST_CHUNK, chunk_for, dtype_for

MOST = CPU_DEFAULTS["chunked_prefill_size"]


def test_a_larger_model_gets_smaller_steps() -> None:
    assert chunk_for(1e3, 1, wide=False) == MOST  # the tiny model, on any machine
    assert chunk_for(1e15, 1, wide=True) == LEAST_CHUNK
    chunk = chunk_for(135e6, 1, wide=False)
    assert LEAST_CHUNK <= chunk < MOST
    assert chunk.bit_count() == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: fpu sse2 avx2", "float32"),
        ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
        ("Features\t: fp asimd", "float32"),
        ("", "bfloat16"),  # no flags are known
    ],
)
def test_a_cpu_without_bfloat16_computes_in_float32(
    line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text(f"processor\t: 0\n{line}\nbugs\t\t: spectre_v1\n")
    monkeypatch.setattr("engine_ext.plugin.worker.cpu_defaults.CPU_FLAGS", flags)
    assert dtype_for(5e8) == expected
    assert dtype_for(1e13) == "bfloat16"  # it would not fit
    memory = tmp_path / "memory.max"
    monkeypatch.setattr("engine_ext.plugin.worker.cpu_defaults.MEMORY", memory)
    memory.write_text("1000000000\n")
    assert dtype_for(5e8) == "bfloat16"
    memory.write_text("max\n")
    assert dtype_for(5e8) == expected
