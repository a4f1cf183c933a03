"""The folder of a comparison: what was asked for, what each stage did, and the rows. Several processes add to it."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ASKED, STAGES, ROWS, CALIBRATION, STEPS, OVERLAP = (
    "asked.json",
    "stages.jsonl",
    "gpu.jsonl",
    "calibration.json",
    "steps.jsonl",
    "overlap.json",
)
BEGINS, ENDS = "begins", "ends"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a comparison runs; the same for all its processes, and for the command that continues it.

    `slower`: emulate an H100 that is so many times slower; 0 for this machine. `rows`: the policies of each mix.
    `seconds`: what a row should take at the bound. `attention`: SGLang's backend; empty for its default.
    """

    data: str
    model: str
    gpu: str
    slower: float
    rows: list[tuple[str, list[str]]]
    has_online: bool
    seconds: float
    attention: str = ""
    file: str | None = None
    price: float | None = None  # dollars for an hour of the machine
    only: list[str] = field(default_factory=list[str])  # stages; empty for all
    engine_args: dict[str, Any] = field(default_factory=dict[str, Any])


class Folder:
    """Reads and adds to the files of one comparison; each line is written at once, and stays if its writer dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @property
    def asked(self) -> Asked | None:
        file = self.path / ASKED
        if not file.exists():
            return None
        said: dict[str, Any] = json.loads(file.read_text())
        said["rows"] = [(mix, policies) for mix, policies in said["rows"]]
        return Asked(**said)

    def keep(self, asked: Asked) -> None:
        part = self.path / f"{ASKED}.part"
        part.write_text(json.dumps(asdict(asked), indent=1))
        part.replace(self.path / ASKED)

    def begins(self, stage: str, limit_s: float) -> None:
        self._add(STAGES, {"stage": stage, "event": BEGINS, **_now(), "limit_s": limit_s})

    def ends(self, stage: str, began: float, **found: Any) -> None:
        """Note how a stage ended that began at `began` of the monotonic clock.

        `failed` says why, if it did; `cut`: the time of the whole was up, so the stage is run again when it continues.
        """
        seconds = round(time.monotonic() - began, 1)
        self._add(STAGES, {"stage": stage, "event": ENDS, **_now(), "seconds": seconds, **found})

    def add_row(self, row: dict[str, Any]) -> None:
        self._add(ROWS, row)

    @property
    def stages(self) -> list[dict[str, Any]]:
        return read(self.path / STAGES)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read(self.path / ROWS)

    @property
    def ended(self) -> dict[str, dict[str, Any]]:
        """The last end of each stage that was not cut, by its name."""
        return {each["stage"]: each for each in self.stages if each["event"] == ENDS and not each.get("cut")}

    def under_way(self, after: int) -> dict[str, Any] | None:
        """Return the stage that has begun last, after so many lines, unless it has ended."""
        stages = self.stages[after:]
        return stages[-1] if stages and stages[-1]["event"] == BEGINS else None

    def _add(self, name: str, row: dict[str, Any]) -> None:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        file = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.lseek(file, 0, os.SEEK_END)
            if size and os.pread(file, 1, size - 1) != b"\n":  # the writer before was killed in the middle of a line
                line = b"\n" + line
            os.write(file, line)
        finally:
            os.close(file)


def _now() -> dict[str, Any]:
    """Return the time for people, and that of the clock that nobody sets, by which limits are kept."""
    return {"time": datetime.now().isoformat(timespec="seconds"), "at": round(time.monotonic(), 3)}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without lines that were cut off."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
