"""`batchweave doctor` on parts that are there, empty, behind and away."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic import command
from typer.testing import CliRunner

from batchweave.table import command_line
from service.db.migrate import config, upgrade
from service.demo.tiny import ensure_tiny_model


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and what it found by part."""
    found = CliRunner().invoke(command_line("doctor"), ["doctor", "--json"], env=environment)
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found.exit_code, {each["part"]: each for each in json.loads(found.stdout)}


def test_a_fresh_machine_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    code, found = doctor(BATCHWEAVE_DATA_DIR=str(folder))
    assert code == 0
    assert set(found) == {"settings", "versions", "database", "redis", "storage", "model", "adapters", "parsers", "gpu"}
    assert {each["state"] for each in found.values()} <= {"ok", "note"}
    assert str(folder) in found["storage"]["what"]
    assert not folder.exists()


def test_little_free_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_on(monkeypatch, 9)
    code, found = doctor(BATCHWEAVE_DATA_DIR=str(tmp_path))
    assert code == 0
    for part in ("database", "storage"):
        assert found[part]["state"] == "note"
        assert "9 GiB free" in found[part]["what"]
        assert "twice" in found[part]["todo"]


def free_on(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Let each disk have this much free space."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=gib * 2**30))


def test_an_empty_database_is_fine_and_one_that_is_up_to_date_too(
    empty_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_on(monkeypatch, 100)
    here = {"BATCHWEAVE_DATA_DIR": str(tmp_path), "BATCHWEAVE_DATABASE_URL": empty_database_url}
    code, found = doctor(**here)
    assert (code, found["database"]["state"]) == (0, "ok")
    upgrade(empty_database_url)
    code, found = doctor(**here)
    assert (code, found["database"]["state"]) == (0, "ok")
    command.downgrade(config(empty_database_url), "-1")
    code, found = doctor(**here)
    assert (code, found["database"]["state"]) == (0, "note")
    assert "schema" in found["database"]["what"]


def test_a_setting_that_a_start_would_refuse_is_named(tmp_path: Path) -> None:
    here = {"BATCHWEAVE_DATA_DIR": str(tmp_path)}
    code, found = doctor(**here, BATCHWEAVE_NODES="2", BATCHWEAVE_NODE_RANK="2")
    assert (code, found["settings"]["state"]) == (1, "wrong")
    assert "BATCHWEAVE_NODE_RANK" in found["settings"]["what"]
    code, found = doctor(**here, BATCHWEAVE_ENGINE="scripted", BATCHWEAVE_SCRIPT=str(tmp_path / "missing.json"))
    assert (code, "missing.json" in found["settings"]["what"]) == (1, True)


def test_weights_that_are_cut_off_are_named(tmp_path: Path) -> None:
    ensure_tiny_model(tmp_path / "model", ["a b c"])
    here = {"BATCHWEAVE_DATA_DIR": str(tmp_path), "BATCHWEAVE_MODEL": str(tmp_path / "model")}
    assert doctor(**here)[1]["model"]["state"] == "ok"
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    code, found = doctor(**here)
    assert (code, found["model"]["state"]) == (1, "wrong")
    assert f"{weights.name} has" in found["model"]["what"]


def test_what_is_away_is_named_with_what_to_do(tmp_path: Path) -> None:
    code, found = doctor(
        BATCHWEAVE_DATA_DIR=str(tmp_path),
        BATCHWEAVE_DATABASE_URL="postgresql://u:secret@127.0.0.1:1/x",
        BATCHWEAVE_REDIS_URL="redis://127.0.0.1:1",
        BATCHWEAVE_MODEL=str(tmp_path),
        BATCHWEAVE_ADAPTERS=json.dumps({"sql": str(tmp_path / "missing")}),
        BATCHWEAVE_TOOL_PARSER="hermit",
    )
    assert code == 1
    for part in ("database", "redis", "model", "adapters", "parsers"):
        assert found[part]["state"] == "wrong"
        assert found[part]["todo"]
    assert "has no tool_call_parser 'hermit'. It has" in found["parsers"]["what"]
    assert "secret" not in json.dumps(found)
