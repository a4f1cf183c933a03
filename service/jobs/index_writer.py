"""Writes the index of a batch while its lines are read: records, and the token ids of prompts.

The tokenizer has threads of its own: while it works on some lines, the next ones are read and checked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from service.objects.request_index import RECORD
from service.objects.request_output import asked_output
from service.objects.storage import Writer
from service.requests.lines import MAX_ERRORS, LineChecker, LineError
from service.requests.tokens import Prompt, PromptTokens

TOKENIZE_LINES = 256
TOKENIZE_BYTES = 1024 * 1024  # of lines, whose parsed bodies are several times as large


class Place(NamedTuple):
    """Of a line: offset and bytes in its file, its 1-based number, and what it asks for (AskedOutput.packed)."""

    offset: int
    length: int
    line: int
    asked: int


class _Ahead(NamedTuple):
    """Lines whose prompts are being tokenized."""

    places: list[Place]
    bodies: list[dict[str, Any]]
    prompts: asyncio.Future[list[Prompt]]


@dataclass(slots=True)
class IndexWriter:
    """Writes a batch's index, some lines at a time; from the first error on only lengths are checked."""

    checker: LineChecker
    endpoint: str
    records: Writer
    tokens: Writer
    context_length: int | None = None
    fails_lines: bool = False  # a request that is too long is left to the engine, which fails it alone
    _places: list[Place] = field(default_factory=list[Place])
    _bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _bytes: int = 0
    _ahead: _Ahead | None = None
    prompt_tokens: int = 0

    async def add(self, encoder: PromptTokens, place: Place, body: dict[str, Any]) -> None:
        """A line that passed."""
        self._places.append(place)
        self._bodies.append(body)
        self._bytes += place.length
        if len(self._bodies) == TOKENIZE_LINES or self._bytes >= TOKENIZE_BYTES:
            await self._hand_over(encoder)

    async def finish(self, encoder: PromptTokens) -> None:
        """Write what was added last."""
        await self._hand_over(encoder)
        await self._write()

    async def _hand_over(self, encoder: PromptTokens) -> None:
        """Write the lines that were tokenized meanwhile, and have those tokenized that were added since."""
        await self._write()
        places, bodies, self._places, self._bodies, self._bytes = self._places, self._bodies, [], [], 0
        errors = len(self.checker.errors)
        if bodies and errors < MAX_ERRORS and not (errors and self.context_length is None):
            work = asyncio.ensure_future(asyncio.to_thread(encoder.encode, self.endpoint, bodies))
            self._ahead = _Ahead(places, bodies, work)

    async def _write(self) -> None:
        if self._ahead is None:
            return
        places, bodies, work = self._ahead
        self._ahead = None
        prompts = await work
        for place, body, prompt in zip(places, bodies, prompts, strict=True):
            self._judge_length(place.line, body, prompt)
        if not self.checker.errors:
            ids = [prompt.ids for prompt in prompts]
            self.prompt_tokens = await _append(self.records, self.tokens, places, ids, self.prompt_tokens)

    def _judge_length(self, line: int, body: dict[str, Any], prompt: Prompt) -> None:
        """Refuse what the engine would refuse for its length; a prompt that is not known to the token is left to it."""
        answer = max(asked_output(self.endpoint, body).most, 1)
        fewest = len(prompt.ids) if prompt.is_exact else prompt.fewest
        if self.context_length is None or self.fails_lines or fewest + answer <= self.context_length:
            return
        message = (
            f"The prompt has {len(prompt.ids)} tokens, and with {answer} for the answer that is more than the context "
            f"of the model, {self.context_length} tokens. Shorten the prompt, lower max_tokens, or "
            "create the batch with 'on_long_line': 'fail_line', which runs the others."
        )
        self.checker.add(LineError("context_length_exceeded", message, line, "body"))


async def _append(
    records: Writer, tokens: Writer, places: list[Place], prompts: list[Sequence[int]], tokens_at: int
) -> int:
    """Write records and token ids of a chunk; returns where the next token goes."""
    rows = np.zeros(len(places), dtype=RECORD)
    lengths = np.array([len(each) for each in prompts], dtype=np.int64)
    for name, column in zip(Place._fields, zip(*places, strict=True), strict=True):
        rows[name] = column
    rows["tokens"] = lengths
    rows["tokens_at"] = tokens_at + np.cumsum(lengths) - lengths
    flat = np.fromiter(chain.from_iterable(prompts), dtype="<u4", count=int(lengths.sum()))
    await records.write(rows.tobytes())
    await tokens.write(flat.tobytes())
    return tokens_at + int(lengths.sum())
