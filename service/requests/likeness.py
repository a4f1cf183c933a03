"""Names the keys by which the lengths of answers are remembered: the beginning of a prompt, and its kind."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from service.requests.tokens import TEMPLATED, token_ids

BEGINNING = 64  # tokens, of which most system prompts and few-shot examples have more
# What makes answers longer or shorter without being in the prompt's first tokens.
SWITCHES = ("chat_template_kwargs", "reasoning_effort", "reasoning", "response_format", "text", "stop")
NOTHING = (0, 0)


def keys_of(
    scope: str,
    endpoint: str,
    body: dict[str, Any],
    prompt: Sequence[int],
    most: int,
    exact: bool,
    thinking: int | None = None,
) -> tuple[int, int]:
    """Return the keys of a request: those of its prompt's beginning and of its kind, 63 bits each.

    Zeros where the answer's length says nothing about others: it is `exact`, or there are several answers. `scope`:
    within which answers are alike, such as a project's with one model. `most`: the most tokens of the answer, or 0.
    `thinking`: how many of them may be thought.
    """
    if exact or _has_several(endpoint, body):
        return NOTHING
    bound = [] if thinking is None else [thinking]  # no null, so that keys without a bound stay as they were
    switches = msgspec.json.encode([body.get(name) for name in SWITCHES] + bound)
    alike = b"\0".join((scope.encode(), endpoint.encode(), switches, str(most.bit_length()).encode()))
    length = str(len(prompt).bit_length()).encode()
    return _key(alike, array("I", prompt[:BEGINNING]).tobytes()), _key(alike, b"kind " + length)


def _has_several(endpoint: str, body: dict[str, Any]) -> bool:
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return True
    prompt = body.get("prompt")
    return endpoint not in TEMPLATED and isinstance(prompt, list) and token_ids(prompt) is None


def _key(*parts: bytes) -> int:
    digest = blake2b(b"\0".join(parts), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1
