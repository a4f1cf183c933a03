"""Tokenizes the texts of a long list in a thread, before SGLang tokenizes and sends them one after the other.

A long list waits, in turns of projects, while the engine has many answers of others to make: SGLang runs each prompt as
a request of its own, and with tens of thousands each step takes seconds.

Between two texts SGLang lets nobody else come to its loop, and must not: it looks for the answers only once all are
sent, and loses those that came before.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from engine_ext.plugin.worker.aside import LARGE, aside, is_online, project
from engine_ext.plugin.worker.turns import Turns

FEW = 128  # answers of a request that waits for no turn
MOST = 4096  # answers of larger ones that an engine makes at once; one that comes alone may have more
# Of the task's request: by text, what it is as tokens, as often as the text has yet to be sent.
_known: ContextVar[dict[Any, list[Any]] | None] = ContextVar("known", default=None)


def tokenize_ahead(manager: Any) -> None:
    """Let SGLang's tokenizer manager tokenize long texts, and long lists of short ones, in the thread."""
    tokenize, handle = manager._tokenize_texts, manager._handle_batch_request
    turns = {each: Turns(MOST) for each in (True, False)}  # online requests wait for no batch

    async def tokenize_texts(texts: Any, is_cross_encoder: bool = False) -> Any:
        known, key = _known.get(), _key(texts)
        if known and (left := known.get(key)):
            found = left.pop()
            if not left:
                del known[key]
            return found
        if _size(texts) <= LARGE:
            return await tokenize(texts, is_cross_encoder)
        return await aside(lambda: asyncio.run(tokenize(texts, is_cross_encoder)), True)

    async def handle_batch(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        texts = [] if obj.text is None else [obj[place].text for place in range(obj.batch_size)]
        pairs = bool(getattr(obj, "is_cross_encoder_request", False))

        async def all_of_them() -> dict[Any, list[Any]]:
            counts = Counter(map(_key, texts))
            return {key: [await tokenize(_text(key), pairs)] * count for key, count in counts.items()}

        answers = obj.batch_size * getattr(obj, "parallel_sample_num", 1)
        turn = turns[is_online.get()].turn(project.get(), answers) if answers > FEW else nullcontext()
        async with turn:  # and only then have token ids, which take much more memory than text
            manager._raise_if_logical_request_aborted(obj)
            if sum(map(_size, texts)) > LARGE:
                _known.set(await aside(lambda: asyncio.run(all_of_them()), True))
            try:
                async for found in handle(obj, request):
                    yield found
            finally:
                _known.set(None)

    manager._tokenize_texts, manager._handle_batch_request = tokenize_texts, handle_batch


def _size(texts: Any) -> int:
    """Return the characters of a text, or of a list of texts or pairs."""
    return len(texts) if isinstance(texts, str) else sum(map(_size, texts or ()))


def _key(texts: Any) -> Any:
    return texts if isinstance(texts, str) else tuple(map(_key, texts))


def _text(key: Any) -> Any:
    return key if isinstance(key, str) else list(map(_text, key))
