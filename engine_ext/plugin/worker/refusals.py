"""Says by field and code what SGLang refuses in words alone."""

import re
from collections.abc import Mapping
from typing import Any

from engine_ext.plugin.worker.messages import fault_in

# SGLang's words for a request with more tokens than the model's context has.
_TOO_LONG = re.compile(r"context length|max_req_input_len|is too long")
_PLACE = re.compile(r"([a-z_]+)(?:\.[0-9a-z_]+)+(?= )")
_FIELD = re.compile(r"([a-z][a-z_]*) (?:must|should|has|cannot)\b")


MOST_SAID = 300  # characters of what SGLang says
PROMPTS = ("messages", "prompt", "input", "items", "documents")


def in_short(message: str, fields: Mapping[str, Any]) -> str:
    """Return what a message says, without the list of all that a value might have been."""
    if "validation error" not in message:
        return message
    given = fields.get("input")
    if isinstance(given, list) and (fault := fault_in("input", given)):
        return f"{fault[0]} {fault[1]}."
    return "A part of the body has the wrong type: " + " ".join(message.split("\n")[1:3])[:MOST_SAID]


def code_and_param(message: str, fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return OpenAI's code of a message about a request with these fields, and the field that it is about."""
    if _TOO_LONG.search(message):
        return "context_length_exceeded", next((name for name in PROMPTS if name in fields), None)
    found = _FIELD.match(message)
    if (at := _PLACE.match(message)) and at[1] in fields:
        return "invalid_request", at[0]
    return "invalid_request", found[1] if found and found[1] in fields else None
