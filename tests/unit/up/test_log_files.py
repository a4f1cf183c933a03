"""Logs stay small while their writer goes on."""

import subprocess
import time
from pathlib import Path

import pytest

from service.up.log_files import rotate


def test_a_log_is_turned_over_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    assert not rotate(path)
    with path.open("ab") as output:
        writer = subprocess.Popen(
            ["sh", "-c", "echo first; read go; echo second"], stdin=subprocess.PIPE, stdout=output
        )
    assert writer.stdin
    deadline = time.monotonic() + 30
    while not path.read_text():
        assert time.monotonic() < deadline
    assert not rotate(path, 100)
    assert rotate(path, 5)
    writer.communicate(b"go\n")
    assert (tmp_path / "worker.log.1").read_text() == "first\n"
    assert path.read_text() == "second\n"


def test_without_room_for_a_copy_the_log_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker.log"
    path.write_text("much")
    (tmp_path / "worker.log.1").write_text("before")

    def full(_source: Path, target: Path) -> None:
        target.write_text("mu")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    assert rotate(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["worker.log"]
    assert path.read_text() == ""
