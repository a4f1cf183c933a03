"""What the command line has on a machine without the service."""

from importlib.metadata import PackageNotFoundError

import pytest
from typer.testing import CliRunner

from batchweave import table


def test_without_the_server_its_commands_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = CliRunner().invoke(table.command_line(""), ["--help"]).output
    assert "doctor" in listed
    assert "submit" in listed

    def gone(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(table, "distribution", gone)
    listed = CliRunner().invoke(table.command_line(""), ["--help"]).output
    assert "doctor" not in listed
    assert "submit" in listed
    said = CliRunner().invoke(table.command_line("up"), ["up", "--model", "x"])
    assert said.exit_code == 1
    assert "pip install batchweave-server" in said.stderr
