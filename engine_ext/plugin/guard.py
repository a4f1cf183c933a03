"""What SGLang 0.5.17 does not look at itself: it fails on some of these, and of others its scheduler dies, with every
request in it. Most were seen by running the value against a real engine. They look at the request as SGLang's own
model has read it, because that turns "1000000" and 1000000.0 into numbers.
"""

import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234e38
MEDIA = ("image_url", "video_url", "audio_url", "file_url", "url")


def fault(request: Any, vocab_size: int) -> tuple[str, str] | None:
    """The first field that may not reach the engine, and why; None for a request that may."""
    for names, is_fine, reason in _CHECKS:
        for name in names:
            value = getattr(request, name, None)
            if value is not None and not is_fine(value, vocab_size):
                return name, reason
    return None


def prompts_in(request: Any) -> int:
    """How many prompts a request carries as a list; 0 for a single one."""
    prompt = getattr(request, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 0


def _ids_in_vocabulary(value: Any, vocab_size: int) -> bool:
    if isinstance(value, list):
        return all(_ids_in_vocabulary(each, vocab_size) for each in value)
    return not isinstance(value, int) or 0 <= value < vocab_size


def _at_most_vocabulary(value: Any, vocab_size: int) -> bool:
    return int(value) <= vocab_size


def _is_int32(value: Any, _vocab_size: int) -> bool:
    return abs(value) <= INT32_MAX


def _is_float32(value: Any, _vocab_size: int) -> bool:
    values = value.values() if isinstance(value, dict) else [value]
    return all(abs(each) <= FLOAT32_MAX for each in values)


def _compiles(value: Any, _vocab_size: int) -> bool:
    try:
        for pattern in value if isinstance(value, list) else [value]:
            re.compile(pattern)
    except re.error:
        return False
    return True


def _brings_its_media(messages: Any, _vocab_size: int) -> bool:
    """Whether no part of a message has the engine read a file or a host: a batch must not look around in our network.

    What else is in a message, as the arguments of a tool call, is text to the engine.
    """
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else getattr(message, "content", None)
        for part in content if isinstance(content, list) else []:
            if not _is_data(part.model_dump() if isinstance(part, BaseModel) else part):
                return False
    return True


def _is_data(part: Any) -> bool:
    """Whether each URL in a part, of whatever shape, holds its data."""
    if not isinstance(part, dict):
        return True
    return all(
        value.startswith("data:") if key in MEDIA and isinstance(value, str) else _is_data(value)
        for key, value in part.items()
    )


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any, int], bool], str], ...] = (
    (("prompt", "input_ids", "stop_token_ids"), _ids_in_vocabulary, "a token id is outside the model's vocabulary"),
    (("logprobs", "top_logprobs"), _at_most_vocabulary, "more than the model's vocabulary"),
    (("top_k", "min_tokens", "n"), _is_int32, "beyond 32 bits"),
    (("max_tokens", "max_completion_tokens", "max_output_tokens"), _is_int32, "beyond 32 bits"),
    (("logit_bias", "temperature"), _is_float32, "beyond what a 32-bit float holds"),
    (("stop_regex",), _compiles, "not a regular expression"),
    (("messages", "input"), _brings_its_media, "media must come in the request itself, as a data: URL"),
)
