"""Counts what requests find in the KV cache when their prefill begins: others' prefixes, or what was theirs before."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_ext.plugin.scheduler.member import Member
from engine_ext.plugin.scheduler.online import is_ours, length

RECENT = 4096  # ids that are kept


@dataclass(slots=True)
class Reuse:
    """Holds the sums over the requests of batches.

    `prompt_tokens`: those of prompts at their first admission; `cached_tokens`: those of them that were in the cache.
    Of what requests had computed when they left the engine, they found `restored_tokens` when they came again, and not
    `recomputed_tokens`. `recent_ids`: the requests whose prefill began, those of online requests included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    recent_ids: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, batch: Any, continued: Any, running: Mapping[Any, Member]) -> None:
        """Note what the prompts of this batch find; `continued` is in it with another chunk.

        `running`: the requests of batches that are on the engine.
        """
        if batch is None:
            return
        prompts = len(batch.reqs) - len(batch.decoding_reqs or ())  # decodes that ride in it come last
        for req, cached in zip(batch.reqs[:prompts], batch.prefix_lens, strict=False):
            if req is continued:
                continue
            before = _computed_before(req, running)
            if before == 0:
                self.recent_ids.append(req.rid)
            if not is_ours(req):
                continue
            if before == 0:
                self.prompt_tokens += len(req.origin_input_ids)
                self.cached_tokens += cached
            else:
                self.restored_tokens += min(cached, before)
                self.recomputed_tokens += max(0, before - cached)


def _computed_before(req: Any, running: Mapping[Any, Member]) -> int:
    """Return how many tokens had been computed when the request left the engine; 0 if it comes for the first time."""
    if req.output_ids:
        return length(req) - 1  # its last token has never been computed
    return running[req].computed if req in running else 0
