"""Weights that a broken copy or download left behind are named before an engine loads them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.requests.weights import weight_faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"w{number}": np.zeros((4, 4), np.float32)}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_whole_weights_have_no_fault(folder: Path) -> None:
    assert weight_faults(folder) == []


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_file_that_is_cut_off_is_named(folder: Path, kept: int) -> None:
    file = folder / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert [each.split()[0] for each in weight_faults(folder)] == ["model-2.safetensors"]


def test_a_file_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    assert weight_faults(folder) == ["model-1.safetensors is not there"]


def test_weights_in_a_format_that_nobody_reads_may_be_there_in_part(folder: Path) -> None:
    index = {"weight_map": {"w1": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_bytes(b"cut")
    assert weight_faults(folder) == []


def test_a_damaged_header_is_named(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"x" * 200)
    assert weight_faults(folder)[0].startswith("model-1.safetensors is damaged")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in weight_faults(tmp_path)[0]
