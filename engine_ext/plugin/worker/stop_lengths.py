"""Counts the tokens of a stop string once; SGLang does for each answer's copy of it, 28 s for a thousand prompts."""

from functools import lru_cache
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

REMEMBERED = 64  # strings, of at most 1024 characters each


class Sampling(SamplingParams, kw_only=True, array_like=True):
    """SGLang's parameters, which the scheduler gets too: this module imports little."""

    def normalize(self, tokenizer: Any) -> None:
        super().normalize(None if tokenizer is None else _encoder_of(tokenizer))


class _Encoder:
    """Stands for the tokenizer where SGLang asks how long stop strings are."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = lru_cache(REMEMBERED)(tokenizer.encode)


@lru_cache(1)
def _encoder_of(tokenizer: Any) -> _Encoder:
    return _Encoder(tokenizer)
