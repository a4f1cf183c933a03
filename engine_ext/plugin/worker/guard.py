"""Refuses request fields that SGLang 0.5.17 does not check itself.

SGLang fails on some of these values; others kill its scheduler, with every request in it. Most were found by running
the value against a real engine. The checks read the request as parsed by SGLang's own model, because that turns
"1000000" and 1000000.0 into numbers.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from engine_ext.plugin.worker.media import media_fault

INT32_MAX = 2**31 - 1
MOST_BIAS = 100.0  # as in OpenAI's API
# Below these values a logit overflows, and the sampler fails on all requests of the step.
LEAST_TEMPERATURE, LEAST_REPETITION_PENALTY = 1e-3, 1e-2
SPACES = ("cache_salt", "extra_key")


def own_space(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a body's fields with digests in place of the names of the caches that it wants to share with its like.

    SGLang joins these names and appends the id of a LoRA adapter. As they came, they could be such an id, which follows
    from the adapter's name and path: what the base model computes would be found by requests for the adapter.
    """
    return fields | {name: _digest(name, fields[name]) for name in SPACES if name in fields}


def _digest(name: str, given: Any) -> Any:
    """Return the digest of a text, or of each text of a list; SGLang refuses what is neither."""
    if isinstance(given, list):
        return [_digest(name, each) for each in given]
    return (
        hashlib.sha256(f"{name} {given}".encode(errors="surrogatepass")).hexdigest()
        if isinstance(given, str)
        else given
    )


def fault(request: Any, vocab_size: int) -> tuple[str, str] | None:
    """Return the first field that must not reach the engine, and the reason; None if the request may pass."""
    if getattr(request, "echo", None) and getattr(request, "logprobs", None) == 0:
        return "logprobs", "must be at least 1 when echo is set"
    for names, is_fine, reason in _CHECKS:
        for name in names:
            value = getattr(request, name, None)
            if value is not None and not is_fine(value, vocab_size):
                return name, reason
    for name in ("messages", "input"):
        if wrong := media_fault(getattr(request, name, None)):
            return name, wrong
    return None


def prompts_in(request: Any) -> int:
    """Return how many prompts a request carries as a list; 0 for a single prompt."""
    prompt = getattr(request, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 0


def _ids_in_vocabulary(value: Any, vocab_size: int) -> bool:
    if isinstance(value, list):
        if set(map(type, value)) == {int}:
            return min(value) >= 0 and max(value) < vocab_size
        return all(_ids_in_vocabulary(each, vocab_size) for each in value)
    return not isinstance(value, int) or 0 <= value < vocab_size


def _at_most_vocabulary(value: Any, vocab_size: int) -> bool:
    return int(value) <= vocab_size


def _is_int32(value: Any, _vocab_size: int) -> bool:
    return abs(value) <= INT32_MAX


def _is_length(value: Any, _vocab_size: int) -> bool:
    return 1 <= value <= INT32_MAX


def _are_biases(value: Any, _vocab_size: int) -> bool:
    return all(abs(each) <= MOST_BIAS for each in value.values())


def _is_temperature(value: Any, _vocab_size: int) -> bool:
    return value == 0 or LEAST_TEMPERATURE <= value <= MOST_BIAS


def _is_repetition_penalty(value: Any, _vocab_size: int) -> bool:
    return value >= LEAST_REPETITION_PENALTY


def _compiles(value: Any, _vocab_size: int) -> bool:
    try:
        for pattern in value if isinstance(value, list) else [value]:
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any, int], bool], str], ...] = (
    (("prompt", "input_ids", "stop_token_ids"), _ids_in_vocabulary, "a token id is outside the model's vocabulary"),
    (("logprobs", "top_logprobs"), _at_most_vocabulary, "must not exceed the size of the vocabulary"),
    (("top_k", "min_tokens", "n"), _is_int32, "must fit into 32 bits"),
    (("max_tokens", "max_completion_tokens", "max_output_tokens"), _is_length, f"must be from 1 to {INT32_MAX}"),
    (("logit_bias",), _are_biases, f"must be between -{MOST_BIAS:.0f} and {MOST_BIAS:.0f}"),
    (("temperature",), _is_temperature, f"must be 0, or between {LEAST_TEMPERATURE} and {MOST_BIAS:.0f}"),
    (("repetition_penalty",), _is_repetition_penalty, f"must be at least {LEAST_REPETITION_PENALTY}"),
    (("stop_regex",), _compiles, "not a regular expression"),
)
