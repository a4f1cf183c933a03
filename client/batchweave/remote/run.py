"""The part of `batchweave run` that speaks HTTP: runs a file as one batch, once, and writes results as they come."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from batchweave.errors import CommandError
from batchweave.remote.client import AnswerError, Away, Client
from batchweave.remote.download import download
from batchweave.remote.follow import ENDED, extras, follow, report
from batchweave.remote.session import Exit
from batchweave.remote.shapes import Batch, File
from batchweave.remote.upload import upload
from batchweave.terminal import said

PIECE = 1 << 20
WRITE_S = 1.0
WINDOW = "30d"  # the longest: nobody waits for a deadline here


@dataclass(slots=True)
class Run:
    """A file that runs as one batch of the service that `client` calls.

    `memory`: the folder with a note of each run, which says what it was uploaded as. `answers`: what else the answers
    hang on: the model, and what runs it.
    """

    client: Client
    file: Path
    output: Path
    memory: Path
    endpoint: str
    answers: str
    accept: dict[str, Any] | None = None  # see `accept_of`
    _written_at: float = field(default=0.0)

    @property
    def errors(self) -> Path:
        return errors_beside(self.output)

    @property
    def part(self) -> Path:
        return part_of(self.output)

    def run(self, check: Callable[[], None], again: bool = False) -> Exit:
        """Run the file, or continue, and return the exit code.

        `check` raises if the service has ended. `again`: start from nothing, also if it has been run.
        """
        note = self.memory / f"{self._name()}.json"
        if again:
            note.unlink(missing_ok=True)
        with self.part.open("ab") as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(f"{self.part} is being written by another run of this command.") from error
            part.truncate(0)  # it is fetched again: what is there may be of another file
            try:
                return self._run_locked(note, check)
            except BaseException:
                if self.part.exists() and not self.part.stat().st_size:
                    self.part.unlink()  # nothing came
                raise

    def _run_locked(self, note: Path, check: Callable[[], None]) -> Exit:
        batch = self._batch(note)

        def at_each(now: Batch) -> None:
            check()
            if time.monotonic() - self._written_at > WRITE_S:
                with suppress(AnswerError, Away, httpx.TransportError):  # the next look tries again
                    self._write(extras(now).get("early_output_file_id"))
                self._written_at = time.monotonic()

        batch = follow(self.client, batch.id, at_each=at_each)
        code = report(batch)
        self._finish(batch)
        if batch.status != "completed":  # the next run starts from nothing
            note.unlink(missing_ok=True)
        return code

    def _batch(self, note: Path) -> Batch:
        """Return the batch of this file: the one that an earlier run created, or a new one.

        The id of the uploaded file is written down before the create, which carries a key: whatever was interrupted,
        there is one batch.
        """
        for _ in range(2):
            known = _read(note)
            file_id = known.get("file")
            if file_id is None:
                file_id = upload(self.client, self.file).id
                _write_note(note, {"file": file_id, "path": str(self.file.resolve())})
            asked: dict[str, Any] = {"input_file_id": file_id, "endpoint": self.endpoint, "completion_window": WINDOW}
            if self.accept:
                asked["batchweave"] = {"accept": self.accept}
            try:
                batch = Batch.of(self.client.post("/batches", asked, key=f"run-{file_id}"))
            except AnswerError as error:
                if not known or error.may_pass:
                    raise
                note.unlink(missing_ok=True)  # its file is gone
                continue
            if known and batch.status in ENDED and not self._has_results(batch):
                note.unlink(missing_ok=True)  # it was cancelled, or its results were deleted
                continue
            if known:
                how = "has been run already; --again runs it again" if batch.status in ENDED else "continues"
                said.print(f"{self.file} {how}: {batch.id}")
            else:
                said.print(f"{self.file} runs as {batch.id}; results come into {self.part}")
            return batch
        raise CommandError(f"{self.file} cannot be continued; run it with --again.")

    def _has_results(self, batch: Batch) -> bool:
        if batch.status != "completed":
            return False
        try:
            for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
                self.client.get(f"/files/{file_id}")
        except AnswerError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _write(self, file_id: str | None) -> None:
        """Add to the part what has come since."""
        if file_id is None:
            return
        has = self.part.stat().st_size
        try:
            with self.client.content(file_id, {"Range": f"bytes={has}-"}) as answer, self.part.open("ab") as opened:
                for piece in answer.iter_bytes(PIECE):
                    opened.write(piece)
        except AnswerError as error:
            if error.status != 416:  # nothing new
                raise

    def _finish(self, batch: Batch) -> None:
        if batch.output_file_id is None:
            self.part.unlink(missing_ok=True)
            said.print(f"no results: {batch.id} has no successful request")
        else:
            size = File.of(self.client.get(f"/files/{batch.output_file_id}")).bytes
            if self.part.stat().st_size < size:
                with suppress(AnswerError, Away, httpx.TransportError):
                    self._write(batch.output_file_id)  # the finished file begins with the same bytes
            if self.part.stat().st_size == size:
                os.replace(self.part, self.output)
            else:
                self.part.unlink(missing_ok=True)
                size = download(self.client, batch.output_file_id, self.output)
            said.print(f"results: {self.output} ({size:,} bytes)")
        if batch.error_file_id is not None:
            said.print(f"errors: {self.errors} ({download(self.client, batch.error_file_id, self.errors):,} bytes)")
        elif self.errors.exists() and batch.status == "completed":
            said.print(f"no errors: {self.errors} is from an earlier run, and left as it is", style="yellow")

    def _name(self) -> str:
        """Return what tells this run from others: its file's content, what answers it, and where its results go."""
        about = f"{self.endpoint}\n{self.answers}\n{self.output.resolve()}\n"
        about += f"{json.dumps(self.accept, sort_keys=True)}\n" if self.accept else ""
        found = hashlib.sha256(about.encode())
        with self.file.open("rb") as opened:
            while piece := opened.read(PIECE):
                found.update(piece)
        return found.hexdigest()[:32]


def errors_beside(output: Path) -> Path:
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def part_of(output: Path) -> Path:
    """Return where results come while the file runs."""
    return output.with_name(f"{output.name}.part")


def check_places(file: Path, output: Path) -> None:
    """Check before anything runs that results can be written, and not over their requests. Raises CommandError."""
    for place in (output, part_of(output), errors_beside(output)):
        if place.exists() and not place.is_file():
            raise CommandError(f"{place} is no file; choose another --output.")
        if place.resolve() == file.resolve():
            raise CommandError(f"the results would replace {file}; choose another --output.")


def check_served(client: Client, model: str) -> None:
    """Check that a service which was joined serves the model. Raises CommandError."""
    served = [each["id"] for each in client.every("/models")]
    if served and model not in served:
        raise CommandError(
            f"the service that runs on this data folder serves {', '.join(served)}, and not {model}. Stop it, or use "
            "another --data-dir."
        )


def _read(note: Path) -> dict[str, Any]:
    try:
        known = json.loads(note.read_bytes())
        return known if isinstance(known, dict) and isinstance(known.get("file"), str) else {}  # pyright: ignore
    except (FileNotFoundError, ValueError):
        return {}


def _write_note(note: Path, known: dict[str, str]) -> None:
    """Write a note that is there whole or not at all, also after a power loss."""
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = note.with_suffix(".new")
    with new.open("w") as opened:
        json.dump(known, opened)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(new, note)
    folder = os.open(note.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
