"""Works out what a batch of SGLang's makes the engine do in one step."""

from typing import Any, NamedTuple

import numpy as np


class StepLoad(NamedTuple):
    """The load of one step.

    `quadratic`: the sum of end^2 - begin^2 over the prompt chunks. `kv_tokens`: KV tokens that the `decoding` requests
    read.
    """

    prompt_tokens: int
    quadratic: float
    decoding: int
    kv_tokens: int


def load_of(batch: Any) -> StepLoad:
    """Return the load of a prefill batch, with or without decodes that ride in it, or of a decode batch."""
    if not batch.forward_mode.is_extend():  # a mixed batch counts as extend
        return StepLoad(0, 0.0, len(batch.reqs), int(batch.seq_lens_cpu.sum()) if batch.reqs else 0)
    decoding = len(batch.decoding_reqs or ())
    prompts = len(batch.reqs) - decoding
    begins, lengths = np.array(batch.prefix_lens, dtype=np.float64), np.array(batch.extend_lens)
    ends = begins[:prompts] + lengths[:prompts]
    quadratic = float((ends**2 - begins[:prompts] ** 2).sum())
    return StepLoad(int(lengths[:prompts].sum()), quadratic, decoding, int(begins[prompts:].sum()))
