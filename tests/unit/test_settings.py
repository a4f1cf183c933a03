"""Settings name the variable that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import typer

from service.cli.start import models_of
from service.errors import SettingsError
from service.settings import load_settings
from service.worker.engine import with_adapters


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "eighty"), ("LEASE_S", "0"), ("SLICE_REQUESTS", "-1"), ("ENGINE_ARGS", "{not json")]
)
def test_wrong_value_names_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"BATCHWEAVE_{name}", value)
    with pytest.raises(SettingsError, match=f"BATCHWEAVE_{name}"):
        load_settings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_worker_takes_online_requests_at_one_address(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("BATCHWEAVE_ONLINE_HOST", host)
    with pytest.raises(SettingsError, match="BATCHWEAVE_ONLINE_HOST"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "variable"),
    [
        ({"model_name": "llama3:8b"}, "BATCHWEAVE_MODEL_NAME"),
        ({"adapters": {"a:b": "x"}}, "BATCHWEAVE_ADAPTERS"),
        ({"adapters": {"": "x"}}, "BATCHWEAVE_ADAPTERS"),
        ({"engine_args": {"lora_paths": ["x"]}}, "BATCHWEAVE_ENGINE_ARGS"),
        ({"engine_args": {"tool_call_parser": "qwen"}}, "BATCHWEAVE_TOOL_PARSER"),
        ({"engine_args": {"hicache_storage_backend": "file"}}, "BATCHWEAVE_SHARED_CACHE"),
        ({"engine_args": {"enable_lmcache": True}}, "enable_lmcache"),
    ],
)
def test_a_name_that_requests_cannot_use_stops_the_start(given: dict[str, Any], variable: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        load_settings(**given)


def test_adapters_have_names_of_their_own_and_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sql").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = load_settings(model_name="m", adapters={"sql": "sql", "hub": "someone/lora"})
    assert settings.served_models == ["m", "m:sql", "m:hub"]
    paths = [each["lora_path"] for each in with_adapters(settings, {})["lora_paths"]]
    assert paths == [str(tmp_path / "sql"), "someone/lora"]


def test_argument_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWEAVE_PORT", "9000")
    assert load_settings().port == 9000
    assert load_settings(port=9001, host=None).port == 9001


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgres://h/d", "postgresql+asyncpg://h/d"),
        ("postgresql://h/d?sslmode=require", "postgresql+asyncpg://h/d?ssl=require"),
        ("sqlite:////x/y.db", "sqlite+aiosqlite:////x/y.db"),
    ],
)
def test_database_url_gets_its_driver(url: str, driver: str) -> None:
    assert load_settings(database_url=url).database == driver


def test_deep_folder_moves_the_socket_and_only_the_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    assert len(str(load_settings(data_dir=deep).redis_socket)) <= 100
    assert load_settings(data_dir=deep).storage.startswith(deep.as_uri())
    assert load_settings(data_dir=Path("/d")).redis_socket == Path("/d/redis/redis.sock")


def test_model_is_served_under_a_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert load_settings().served_model == "batchweave-demo"
    assert load_settings(model="org/model-7b").served_model == "org/model-7b"
    assert load_settings(model=str(tmp_path / "tiny")).served_model == "tiny"
    assert load_settings(model="org/model-7b", model_name="m").served_model == "m"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"script": "rules.json"}, "BATCHWEAVE_SCRIPT"),
        ({"engine": "scripted", "BATCHWEAVE_NODES": 2}, "BATCHWEAVE_ENGINE"),
        ({"engine": "scripted", "emulated_device": "no answer is real"}, "BATCHWEAVE_ENGINE"),
        ({"engine": "vllm"}, "BATCHWEAVE_ENGINE"),
    ],
)
def test_a_scripted_engine_is_asked_for_and_stands_alone(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_settings(**given)


def test_what_is_given_replaces_an_object_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWEAVE_ADAPTERS", '{"sql": "/x"}')
    monkeypatch.setenv("BATCHWEAVE_ENGINE_ARGS", '{"tp_size": 2}')
    found = load_settings(adapters={}, engine_args={"context_length": 8})
    assert (found.adapters, found.engine_args) == ({}, {"context_length": 8})
    assert load_settings().adapters == {"sql": "/x"}


def test_adapters_and_names_of_the_environment_are_the_first_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWEAVE_ADAPTERS", '{"sql": "/x"}')
    monkeypatch.setenv("BATCHWEAVE_MODEL_NAME", "mine")
    monkeypatch.setenv("BATCHWEAVE_ENGINE_ARGS", '{"context_length": 512}')
    first, second = models_of(["demo", "org/bge:embedding"], None)
    assert first.served_models == ["mine", "mine:sql"]
    assert (second.served_models, second.model) == (["org/bge"], "org/bge")
    assert first.engine_args == {"context_length": 512}
    assert second.engine_args == {"context_length": 512, "is_embedding": True}
    monkeypatch.delenv("BATCHWEAVE_MODEL_NAME")
    assert [each.served_model for each in models_of(["demo", "tiny"], ["a", "b"])] == ["a", "b"]
    for models, names in ((["demo", "tiny"], None), ([":embedding"], None), (["demo"], ["a", "b"])):
        with pytest.raises(typer.Exit):
            models_of(models, names)
