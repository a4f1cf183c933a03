"""What fleet.yaml may say."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import StartError
from service.fleet.spec import MOST_BYTES, ModelSpec, read_fleet


def fleet(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def test_a_model_is_told_all_its_gpus(tmp_path: Path) -> None:
    text = (
        "models:\n- {name: big, model: a/b, gpus: 8, nodes: 2, max: 3, settings: {NCCL_DEBUG: WARN}}\n- {name: small}"
    )
    big, small = read_fleet(fleet(tmp_path, text)).models
    assert big.variables == {
        "NCCL_DEBUG": "WARN",
        "BATCHWEAVE_MODEL": "a/b",
        "BATCHWEAVE_MODEL_NAME": "big",
        "BATCHWEAVE_ENGINE_ARGS": '{"tp_size": 16}',
    }
    assert json.loads(small.variables["BATCHWEAVE_ENGINE_ARGS"]) == {}
    assert small.variables["BATCHWEAVE_MODEL"] == "small"


def model(**about: Any) -> ModelSpec:
    return ModelSpec.model_validate({"name": "a", **about})


def test_only_what_an_engine_starts_with_changes_its_digest() -> None:
    assert model(max=9, min=1, start_s=5.0).digest == model().digest
    assert model(gpus=2).digest != model().digest
    assert model(settings={"A": "1"}).digest != model().digest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [", "line 1"),
        ("- a", "must have `models:`"),
        ("models: []", "models: List should have at least 1 item"),
        ("models:\n- {name: a, gpu: 1}", "models.0.gpu: Extra inputs are not permitted"),
        ("models:\n- {name: a, min: 2}", "models.0: min (2) is more than max (1)"),
        ("models:\n- {name: a}\n- {name: a}", "two have the name 'a'"),
        ("models:\n- {name: a/b}\n- {name: a-b}", "two have the name without special characters 'a-b'"),
        ("models:\n- {name: a, settings: {BATCHWEAVE_NODES: '2'}}", "settings.BATCHWEAVE_NODES: the fleet sets it"),
        ("models:\n- {name: a, settings: {BATCHWEAVE_GPUS: '2'}}", "settings.BATCHWEAVE_GPUS: there is no such"),
        ("models:\n- {name: a, gpus: 4, engine_args: {tp_size: 2}}", "is 2, but the engine has 4 GPUs"),
        ("models:\n- {name: a, engine_args: {tp_size: two}}", "engine_args.tp_size: must be a whole number, 1 or more"),
        ("models:\n- {name: a}\nidle: 3", "idle: Extra inputs"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(StartError) as caught:
        read_fleet(fleet(tmp_path, text))
    assert says in str(caught.value)
    assert "fleet.yaml" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        read_fleet(tmp_path / "none.yaml")
    with pytest.raises(StartError, match="larger than 1 MiB"):
        read_fleet(fleet(tmp_path, "#" * (MOST_BYTES + 1)))


def test_two_ways_to_divide_gpus(tmp_path: Path) -> None:
    assert model(gpus=8, engine_args={"tp_size": 2, "pp_size": 2, "dp_size": 2}).all_gpus == 8
