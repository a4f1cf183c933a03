"""What SGLang 0.5.17 does not look at itself: it fails on some of these, and of others its scheduler dies, with every
request in it. Most were seen by running the value against a real engine. They look at the request as SGLang's own
model has read it, because that turns "1000000" and 1000000.0 into numbers.
"""

import re
from typing import Any

INT32_MAX = 2**31 - 1
MEDIA = ("image_url", "video_url", "audio_url")


def fault(request: Any, vocab_size: int) -> tuple[str, str] | None:
    """The first field that may not reach the engine, and why; None for a request that may."""
    for name in ("prompt", "input_ids", "stop_token_ids"):
        if not _in_vocabulary(getattr(request, name, None), vocab_size):
            return name, f"a token id is outside the vocabulary of {vocab_size}"
    for name in ("logprobs", "top_logprobs"):
        if _number(getattr(request, name, None)) > vocab_size:
            return name, f"more than the vocabulary of {vocab_size}"
    for name in ("top_k", "max_tokens", "max_completion_tokens", "min_tokens", "n"):
        if abs(_number(getattr(request, name, None))) > INT32_MAX:
            return name, f"its size is beyond {INT32_MAX}"
    if not _compiles(getattr(request, "stop_regex", None)):
        return "stop_regex", "not a regular expression"
    if _fetches(getattr(request, "messages", None)):
        return "messages", "media must come in the request itself, as a data: URL"
    return None


def prompts_in(request: Any) -> int:
    """How many prompts a request carries as a list; 0 for a single one."""
    prompt = getattr(request, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 0


def _in_vocabulary(ids: Any, vocab_size: int) -> bool:
    if isinstance(ids, list):
        return all(_in_vocabulary(each, vocab_size) for each in ids)
    return not isinstance(ids, int) or 0 <= ids < vocab_size


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _compiles(patterns: Any) -> bool:
    try:
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            re.compile(pattern or "")
    except re.error:
        return False
    return True


def _fetches(messages: Any) -> bool:
    """Whether a message has the engine read a file or a URL: a batch must not look around in our network."""
    for message in messages if isinstance(messages, list) else []:
        content = getattr(message, "content", None)
        for part in content if isinstance(content, list) else []:
            media = next((getattr(part, name) for name in MEDIA if getattr(part, name, None) is not None), None)
            if media is not None and not str(getattr(media, "url", "")).startswith("data:"):
                return True
    return False
