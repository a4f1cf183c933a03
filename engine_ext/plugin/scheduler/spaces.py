"""Keeps what projects compute apart in SGLang's cache, or tells each only what its own requests explain.

`usage.cached_tokens`, and the time to the first token, tell a client whether somebody asked the same before: with a
shared cache, nine requests find the next digit of another project's prompt.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.marks import project_of
from engine_ext.plugin.options import mine

BLOCK = 64  # tokens
MOST = 1 << 16  # blocks that are remembered: four million tokens


def into_space(_result: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Give the request a key of its project's own in the cache, before its client's salt and its adapter."""
    project = project_of(req)
    if project and not mine().shares_cache:
        req.extra_key = f"{project}/{req.extra_key or ''}"  # an id of a project has no slash


class Explained:
    """Remembers, in blocks of BLOCK tokens, what each project's requests had in their prompts and answers."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def tokens(self, space: str, ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens an earlier request of this space had as well."""
        blocks = self._blocks(space, ids)
        return BLOCK * next((at for at, block in enumerate(blocks) if block not in self._known), len(blocks))

    def note(self, space: str, ids: Sequence[int]) -> None:
        for block in self._blocks(space, ids):
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    @staticmethod
    def _blocks(space: str, ids: Sequence[int]) -> list[bytes]:
        """Return a digest for each whole block, which stands for all tokens up to its end."""
        data, found, before = np.asarray(ids, dtype=np.int64).tobytes(), list[bytes](), space.encode()
        for first in range(0, len(data) - 8 * BLOCK + 1, 8 * BLOCK):
            before = blake2b(before + data[first : first + 8 * BLOCK], digest_size=12).digest()
            found.append(before)
        return found


@cache
def _explained() -> Explained:
    """Return that of this scheduler."""
    return Explained()


def _space(req: Any) -> str:
    return f"{project_of(req)}/{req.extra_key or ''}"


def tell_its_own(_result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Count as cached, in what a request's client is told, only what its project's earlier requests had."""
    explained = _explained()
    new = [req for req in batch.reqs if project_of(req) and not getattr(req, "batchweave_told", False)]
    for req in new:
        req.batchweave_told = True
        own = explained.tokens(_space(req), req.origin_input_ids)
        req.cached_tokens = min(req.cached_tokens, own)
        req.cached_tokens_device = min(req.cached_tokens_device, req.cached_tokens)
        req.cached_tokens_host = min(req.cached_tokens_host, req.cached_tokens - req.cached_tokens_device)
        req.cached_tokens_storage = 0
    for req in new:
        explained.note(_space(req), req.origin_input_ids)


def remember_answers(_result: Any, _scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Note whole answers: a conversation's next turn has them in its prompt."""
    for req in batch.reqs:
        if project_of(req) and req.finished():
            _explained().note(_space(req), [*req.origin_input_ids, *req.output_ids])


APART = [("sglang.srt.managers.schedule_batch.Req.__init__", into_space, HookType.AFTER)]
SHARED = [
    ("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", tell_its_own, HookType.AFTER),
    ("sglang.srt.managers.scheduler.Scheduler.process_batch_result", remember_answers, HookType.AFTER),
]
