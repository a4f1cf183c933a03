"""Works out what a batch of SGLang's makes the engine do in one step."""

from typing import Any

import numpy as np

from engine_ext.arrays import Bools
from engine_ext.coserve.predictor import Load
from engine_ext.plugin.scheduler.online import length


def load_of_decodes(reqs: list[Any]) -> Load:
    """Return the load of a step in which these decode and nothing else happens."""
    return Load(0, 0.0, 0, len(reqs), sum(length(req) for req in reqs))


def load_of(batch: Any, those: Bools | None = None) -> Load:
    """Return the load of a prefill batch, with or without decodes that ride in it, or of a decode batch.

    `those`: whether each of the batch's requests counts, bool [requests]; None for all.
    """
    if those is None:
        those = np.ones(len(batch.reqs), dtype=np.bool_)
    if not batch.forward_mode.is_extend():  # a mixed batch counts as extend
        reads = int(batch.seq_lens_cpu.numpy()[those].sum()) if batch.reqs else 0
        return Load(0, 0.0, 0, int(those.sum()), reads)
    is_prompt = those & (np.arange(len(those)) < len(batch.reqs) - len(batch.decoding_reqs or ()))
    rides = those & ~is_prompt
    begins, lengths = np.array(batch.prefix_lens, dtype=np.float64), np.array(batch.extend_lens)
    ends = begins[is_prompt] + lengths[is_prompt]
    return Load(
        prompt_tokens=int(lengths[is_prompt].sum()),
        quadratic=float((ends**2 - begins[is_prompt] ** 2).sum()),
        prompts=int(is_prompt.sum()),
        decoding=int(rides.sum()),
        kv_tokens=int(begins[rides].sum()),
    )
