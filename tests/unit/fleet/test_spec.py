"""What fleet.yaml may say."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import StartError
from service.fleet.spec import MOST_BYTES, FleetSpec, ModelSpec, read_fleet


def fleet(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def test_a_model_is_told_all_its_gpus(tmp_path: Path) -> None:
    text = """
models:
- {name: big, model: a/b, adapters: {sql: c/d}, gpus: 8, nodes: 2, max: 3, settings: {NCCL_DEBUG: WARN}}
- {name: small}"""
    big, small = read_fleet(fleet(tmp_path, text)).models
    assert big.variables == {
        "NCCL_DEBUG": "WARN",
        "BATCHWEAVE_MODEL": "a/b",
        "BATCHWEAVE_MODEL_NAME": "big",
        "BATCHWEAVE_ADAPTERS": '{"sql": "c/d"}',
        "BATCHWEAVE_ENGINE_ARGS": '{"tp_size": 16}',
    }
    assert json.loads(small.variables["BATCHWEAVE_ENGINE_ARGS"]) == {}
    assert small.variables["BATCHWEAVE_MODEL"] == "small"


def model(**about: Any) -> ModelSpec:
    return ModelSpec.model_validate({"name": "a", **about})


def digest(online: bool = False, **about: Any) -> str:
    fleet = FleetSpec.model_validate({"models": [model(**about)], "online": online})
    return fleet.digest(fleet.models[0])


def test_only_what_an_engine_starts_with_changes_its_digest() -> None:
    assert digest(max=9, min=1, start_s=5.0) == digest(model="a") == digest()
    assert digest(gpus=2) != digest()
    assert digest(settings={"A": "1"}) != digest()
    assert digest(online=True) != digest()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [", "line 1"),
        ("- a", "must have `models:`"),
        ("models: []", "models: List should have at least 1 item"),
        ("models:\n- {name: a, gpu: 1}", "models.0.gpu: Extra inputs are not permitted"),
        ("models:\n- {name: 'a:b'}", "name: must have no colon"),
        ("models:\n- {name: a, engine_args: {lora_paths: [x]}}", "list the adapters under adapters"),
        ("models:\n- {name: a, engine_args: {tool_call_parser: x}}", "BATCHWEAVE_TOOL_PARSER under settings"),
        ("models:\n- {name: a, adapters: {'x:y': z}}", "should match pattern"),
        ("models:\n- {name: a, min: 2}", "models.0: min (2) is more than max (1)"),
        ("models:\n- {name: a}\n- {name: a}", "two have the name 'a'"),
        ("models:\n- {name: a}\n- &x {name: b}\n- *x", "line 4: aliases are not supported"),
        ("models:\n- {name: a, gpus: true}", "models.0.gpus: Input should be a valid integer"),
        ("models:\n- {name: a, gpus: 4, engine_args: {pp_size: 3}}", "is 3, but the engine has 4 GPUs"),
        ("models:\n- {name: a, engine_args: {revision: 2026-11-26}}", "engine_args: Object of type date"),
        ('models:\n- {name: "a\\nb"}', "models.0.name: String should match pattern"),
        ("models:\n- {name: a}\nseconds_per_engine: .inf", "seconds_per_engine: Input should be a finite number"),
        ("models:\n- {name: a, settings: {BATCHWEAVE_REDIS_URL: x}}", "must be the same for all workers"),
        ("models:\n- {name: a, settings: {BATCHWEAVE_NODES: '2'}}", "settings.BATCHWEAVE_NODES: the fleet sets it"),
        ("models:\n- {name: a, settings: {BATCHWEAVE_GPUS: '2'}}", "settings.BATCHWEAVE_GPUS: there is no such"),
        ("models:\n- {name: a, gpus: 4, engine_args: {tp_size: 2}}", "is 2, but the engine has 4 GPUs"),
        ("models:\n- {name: a, engine_args: {tp_size: two}}", "engine_args: tp_size must be a whole number, 1 or more"),
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {"tp_size": 8}),
        ({"pp_size": 2}, {"tp_size": 4, "pp_size": 2}),
        ({"dp_size": 4}, {"tp_size": 2, "dp_size": 4}),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, {"tp_size": 2, "pp_size": 2, "dp_size": 2}),
        ({"dp_size": 8, "enable_dp_attention": True}, {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}),
    ],
)
def test_gpus_can_be_divided_in_many_ways(given: dict[str, Any], told: dict[str, Any]) -> None:
    assert model(gpus=8, engine_args=given).all_args == told
