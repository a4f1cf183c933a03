"""Says by field and code what SGLang refuses in words alone."""

import re
from collections.abc import Mapping
from typing import Any

# SGLang's words for a request with more tokens than the model's context has.
_TOO_LONG = re.compile(r"context length|max_req_input_len|is too long")
_FIELD = re.compile(r"([a-z][a-z_]*) (?:must|should|has|cannot)\b")


PROMPTS = ("messages", "prompt", "input", "items", "documents")


def code_and_param(message: str, fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return OpenAI's code of a message about a request with these fields, and the field that it is about."""
    if _TOO_LONG.search(message):
        return "context_length_exceeded", next((name for name in PROMPTS if name in fields), None)
    found = _FIELD.match(message)
    return "invalid_request", found[1] if found and found[1] in fields else None
