"""Writes a batch's index while its lines are read: the records, prompt tokens and keys of its requests.

The tokenizer runs in its own threads: while it works on one chunk of lines, the next ones are read and checked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from service.objects.request_index import KEYS, RECORD
from service.objects.request_output import EXACT, MOST_TOKENS, AskedOutput, asked_output
from service.objects.storage import Storage, Writer
from service.requests.likeness import keys_of
from service.requests.lines import MAX_ERRORS, LineChecker, LineError
from service.requests.tokens import Prompt, PromptTokens

TOKENIZE_LINES = 256
TOKENIZE_BYTES = 1024 * 1024  # of raw lines; their parsed bodies are several times as large


class Place(NamedTuple):
    """The place of a line: byte offset and length, 1-based number, and its requested output (AskedOutput.packed).

    `thinking`: the most tokens that its answer may think.
    """

    offset: int
    length: int
    line: int
    asked: int
    thinking: int | None


class _Ahead(NamedTuple):
    """Holds the lines whose prompts are being tokenized."""

    places: list[Place]
    bodies: list[dict[str, Any]]
    prompts: asyncio.Future[list[Prompt]]


@dataclass(slots=True)
class Bounded:
    """A writer that counts its bytes and never uses the disk space that object storage keeps in reserve."""

    storage: Storage
    writer: Writer
    size_bytes: int = 0

    async def write(self, data: bytes) -> None:
        self.storage.check_room(len(data))
        self.size_bytes += len(data)
        await self.writer.write(data)


@dataclass(slots=True)
class IndexWriter:
    """Writes a batch's index in chunks of lines. After the first error it only checks prompt lengths."""

    checker: LineChecker
    endpoint: str
    records: Writer
    tokens: Writer
    keys: Writer
    project_id: str
    context_length: int | None = None
    fails_lines: bool = True  # leave a request that is too long to the engine, which fails only that request
    _places: list[Place] = field(default_factory=list[Place])
    _bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _bytes: int = 0
    _ahead: _Ahead | None = None
    prompt_tokens: int = 0

    async def add(self, encoder: PromptTokens, place: Place, body: dict[str, Any]) -> None:
        """Add a line that passed the checks."""
        self._places.append(place)
        self._bodies.append(body)
        self._bytes += place.length
        if len(self._bodies) == TOKENIZE_LINES or self._bytes >= TOKENIZE_BYTES:
            await self._hand_over(encoder)

    async def finish(self, encoder: PromptTokens) -> None:
        """Write the lines that are still pending."""
        await self._hand_over(encoder)
        await self._write()

    async def _hand_over(self, encoder: PromptTokens) -> None:
        """Write the chunk that has been tokenized, and start tokenizing the lines added since."""
        await self._write()
        places, bodies, self._places, self._bodies, self._bytes = self._places, self._bodies, [], [], 0
        errors = len(self.checker.errors)
        if bodies and errors < MAX_ERRORS and not (errors and (self.fails_lines or self.context_length is None)):
            work = asyncio.ensure_future(asyncio.to_thread(encoder.encode, self.endpoint, bodies))
            self._ahead = _Ahead(places, bodies, work)

    async def _write(self) -> None:
        if self._ahead is None:
            return
        places, bodies, work = self._ahead
        self._ahead = None
        prompts = await work
        ids = [prompt.ids for prompt in prompts]
        for at, (place, body, prompt) in enumerate(zip(places, bodies, prompts, strict=True)):
            if self._is_too_long(body, prompt):
                self._report(place.line, body, prompt)
                # The engine refuses it at once, so it is planned as if it were nothing.
                places[at], ids[at] = place._replace(asked=AskedOutput(1, True).packed), ids[at][:1]
        if not self.checker.errors:
            self.prompt_tokens = await _append(self.records, self.tokens, places, ids, self.prompt_tokens)
            await self._write_keys(places, bodies, ids)

    async def _write_keys(
        self, places: list[Place], bodies: list[dict[str, Any]], prompts: list[Sequence[int]]
    ) -> None:
        scope, found = f"{self.project_id} {self.checker.model}", list[tuple[int, int]]()
        for place, body, prompt in zip(places, bodies, prompts, strict=True):
            most, exact = place.asked & MOST_TOKENS, bool(place.asked & EXACT)
            found.append(keys_of(scope, self.endpoint, body, prompt, most, exact, place.thinking))
        await self.keys.write(np.array(found, dtype=KEYS).tobytes())

    def _is_too_long(self, body: dict[str, Any], prompt: Prompt) -> bool:
        """Return whether the engine would refuse a request as too long.

        A prompt whose token count is only estimated is judged by its lower bound; the engine decides the rest.
        """
        fewest = len(prompt.ids) if prompt.is_exact else prompt.fewest
        return self.context_length is not None and fewest + self._answer(body) > self.context_length

    def _answer(self, body: dict[str, Any]) -> int:
        return max(asked_output(self.endpoint, body).most, 1)

    def _report(self, line: int, body: dict[str, Any], prompt: Prompt) -> None:
        """Report a request that is too long, if it fails the file."""
        if self.fails_lines:
            return
        message = (
            f"The prompt has {len(prompt.ids)} tokens. With {self._answer(body)} for the answer, the request exceeds "
            f"the model's context length of {self.context_length} tokens. Shorten the prompt, lower max_tokens, or "
            "create the batch without 'on_long_line': 'fail_file' to run its other requests."
        )
        self.checker.add(LineError("context_length_exceeded", message, line, "body"))


async def _append(
    records: Writer, tokens: Writer, places: list[Place], prompts: list[Sequence[int]], tokens_at: int
) -> int:
    """Write the records and token ids of a chunk. Returns the position of the next token."""
    rows = np.zeros(len(places), dtype=RECORD)
    lengths = np.array([len(each) for each in prompts], dtype=np.int64)
    for name, column in zip(Place._fields, zip(*places, strict=True), strict=True):
        if name != "thinking":  # which is in the keys
            rows[name] = column
    rows["tokens"] = lengths
    rows["tokens_at"] = tokens_at + np.cumsum(lengths) - lengths
    flat = np.fromiter(chain.from_iterable(prompts), dtype="<u4", count=int(lengths.sum()))
    await records.write(rows.tobytes())
    await tokens.write(flat.tobytes())
    return tokens_at + int(lengths.sum())
