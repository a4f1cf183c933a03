"""Printing for all commands: messages for people go to standard error, results for programs to standard output."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # in user-chosen names, unsafe for a terminal
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Folder for the service's data.")]
said = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class Interrupted(SystemExit):
    """Ends a command after Ctrl-C, when the user has been told what that means."""


def interrupted(message: str) -> NoReturn:
    """End the command after Ctrl-C with this line and exit code 130."""
    said.print(message)
    raise Interrupted(130)


def fail(message: str) -> NoReturn:
    """End the command with one line and exit code 1."""
    said.print(f"error: {message}", style="red")
    raise typer.Exit(1)


def print_json(value: Any) -> None:
    """Print plain values as JSON."""
    print(json.dumps(value, indent=2))


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in full, whatever the terminal's width, so that ids can be copied."""
    rows = [[CONTROL.sub("?", cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: "3 d 4 h", "2 min 5 s"; "< 1 s" for less than one second."""
    if 0 < seconds < 1:
        return "< 1 s"
    left, parts = max(int(seconds), 0), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts[:2])
