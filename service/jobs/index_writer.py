"""Writes the index of a batch while its lines are read: records, and the token ids of prompts."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.jobs.lines import MAX_ERRORS, LineChecker, LineError
from service.jobs.tokens import Prompt, PromptTokens
from service.request_index import RECORD
from service.request_output import asked_output
from service.storage import Writer

TOKENIZE_LINES = 256


@dataclass(slots=True)
class IndexWriter:
    """Writes a batch's index, some lines at a time; from the first error on only lengths are checked."""

    checker: LineChecker
    endpoint: str
    records: Writer
    tokens: Writer
    context_length: int | None = None
    _places: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    _bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    prompt_tokens: int = 0

    async def add(self, encoder: PromptTokens, place: tuple[int, int, int, int], body: dict[str, Any]) -> None:
        """`place`: offset, length, line number and asked output of a line that passed."""
        self._places.append(place)
        self._bodies.append(body)
        if len(self._bodies) == TOKENIZE_LINES:
            await self.flush(encoder)

    async def flush(self, encoder: PromptTokens) -> None:
        places, bodies, self._places, self._bodies = self._places, self._bodies, [], []
        errors = len(self.checker.errors)
        if not bodies or errors >= MAX_ERRORS or (errors and self.context_length is None):
            return
        prompts = await asyncio.to_thread(encoder.encode, self.endpoint, bodies)
        for place, body, prompt in zip(places, bodies, prompts, strict=True):
            self._judge_length(place[2], body, prompt)
        if not self.checker.errors:
            ids = [prompt.ids for prompt in prompts]
            self.prompt_tokens = await _append(self.records, self.tokens, places, ids, self.prompt_tokens)

    def _judge_length(self, line: int, body: dict[str, Any], prompt: Prompt) -> None:
        """Refuse what the engine would refuse for its length; a prompt that is not known to the token is left to it."""
        answer = max(asked_output(self.endpoint, body).most, 1)
        if self.context_length is None or not prompt.is_exact or len(prompt.ids) + answer <= self.context_length:
            return
        message = (
            f"The prompt has {len(prompt.ids)} tokens, and with {answer} for the answer that is more than the context "
            f"of the model, {self.context_length} tokens. Shorten the prompt or lower max_tokens."
        )
        self.checker.add(LineError("context_length_exceeded", message, line, "body"))


async def _append(
    records: Writer, tokens: Writer, places: list[tuple[int, int, int, int]], prompts: list[list[int]], tokens_at: int
) -> int:
    """Write records and token ids of a chunk; returns where the next token goes."""
    rows = np.zeros(len(places), dtype=RECORD)
    lengths = np.array([len(each) for each in prompts], dtype=np.int64)
    for column, name in enumerate(("offset", "length", "line", "asked")):
        rows[name] = [place[column] for place in places]
    rows["tokens"] = lengths
    rows["tokens_at"] = tokens_at + np.cumsum(lengths) - lengths
    flat = np.fromiter((token for each in prompts for token in each), dtype="<u4", count=int(lengths.sum()))
    await records.write(rows.tobytes())
    await tokens.write(flat.tobytes())
    return tokens_at + int(lengths.sum())
