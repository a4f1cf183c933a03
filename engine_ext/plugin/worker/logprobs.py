"""Writes a chat's log probabilities as JSON: SGLang makes an object of each, which takes thirty times as long."""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# What stands for them in the answer until they are put in; in a text of an answer the quotes would be escaped.
PLACE = b'"logprobs":{"content":[]}'


def logprobs_of(answer: dict[str, Any]) -> bytes:
    """Return the JSON of the log probabilities of one of SGLang's answers, as of OpenAI's ChoiceLogprobs."""
    meta = answer["meta_info"]
    tokens: Sequence[Any] = meta.get("output_token_logprobs") or ()
    tops: Sequence[Any] = meta.get("output_top_logprobs") or [()] * len(tokens)
    content = [
        f'{_token(text)}{_number(value)},"top_logprobs":[{_cells(top or ())}]}}'
        for (value, _, text), top in zip(tokens, tops, strict=True)
    ]
    return f'"logprobs":{{"content":[{",".join(content)}]}}'.encode()


def with_logprobs(body: bytes, each: Sequence[bytes]) -> bytes:
    """Return an answer with the log probabilities of its choices."""
    parts = body.split(PLACE)
    assert len(parts) == len(each) + 1
    found = [parts[0]]
    for written, part in zip(each, parts[1:], strict=True):
        found += [written, part]
    return b"".join(found)


def _cells(top: Sequence[Any]) -> str:
    by_text = {text: value for value, _, text in top}  # tokens of one text are one, as SGLang does it
    return ",".join([f"{_token(text)}{_number(value)}}}" for text, value in by_text.items()])


@lru_cache(maxsize=1 << 17)
def _token(text: str) -> str:
    """Return the beginning of a token's object, up to its log probability."""
    found = list(text.encode(errors="replace"))
    return f'{{"token":{json.dumps(text)},"bytes":{json.dumps(found, separators=(",", ":"))},"logprob":'


def _number(value: float | None) -> str:
    return repr(value) if value is not None and math.isfinite(value) else "null"
