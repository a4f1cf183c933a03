"""Logs stay small while their writer goes on."""

import subprocess
from pathlib import Path

from service.log_files import turn_over


def test_a_log_is_turned_over_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    assert not turn_over(path)
    with path.open("ab") as output:
        writer = subprocess.Popen(
            ["sh", "-c", "echo first; read go; echo second"], stdin=subprocess.PIPE, stdout=output
        )
    assert writer.stdin
    while not path.read_text():
        pass
    assert not turn_over(path, 100)
    assert turn_over(path, 5)
    writer.communicate(b"go\n")
    assert (tmp_path / "worker.log.1").read_text() == "first\n"
    assert path.read_text() == "second\n"
