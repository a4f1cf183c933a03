"""Says by field and code what SGLang refuses in words alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine_ext.plugin.worker.messages import fault_in

# SGLang's words for a request with more tokens than the model's context has.
_TOO_LONG = re.compile(r"context length|max_req_input_len|is too long")
_PLACE = re.compile(r"([a-z_]+)(?:\.[0-9a-z_]+)+(?= )")
_FIELD = re.compile(r"([a-z][a-z_]*) (?:must|should|has|cannot)\b")
# The words of xgrammar, after its time of day and its line of C++.
_GRAMMAR = re.compile(r"Failed to compile [a-z_]+ grammar: (?:\[[\d:]+\] \S+:\d+: )?(.*)", re.DOTALL)
_GRAMMARS = ("response_format", "text", "tools")  # fields that bind an answer to a grammar

MOST_SAID = 300  # characters of what SGLang says
MOST_ANY = 2000  # characters of any message, which may quote the body
MOST_NAME = 64  # characters of a key in a place
MOST_BRANCHES = 4  # of a union, that a message names
PROMPTS = ("messages", "prompt", "input", "items", "documents")


def in_short(message: str, fields: Mapping[str, Any]) -> str:
    """Return what a message says, without the list of all that a value might have been, or a place in SGLang's code."""
    if found := _GRAMMAR.match(message):
        field = next((name for name in _GRAMMARS if fields.get(name)), "The request")
        return f"{field} has a schema that cannot be compiled: {found[1].strip()[:MOST_SAID]}"
    if "validation error" not in message:
        ours = message[:MOST_ANY].replace("min_new_tokens", "min_tokens").replace("max_new_tokens", "max_tokens")
        return ours + (" …" if len(message) > MOST_ANY else "")
    given = fields.get("input")
    if isinstance(given, list) and (fault := fault_in("input", given)):
        return f"{fault[0]} {fault[1]}."
    return "A part of the body has the wrong type: " + " ".join(message.split("\n")[1:3])[:MOST_SAID]


def nearest(errors: Iterable[Any], body: Any) -> tuple[str, str]:
    """Return the place in a body of pydantic's errors, and what is wrong there.

    A value that fits no branch of a union has an error for each branch: the longest path is the closest branch.
    """
    said: dict[str, list[str]] = {}
    for error in errors:
        found = said.setdefault(_place(error["loc"], body, error["type"] == "missing"), [])
        found.append("is missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, "))
    place = max(said, key=lambda each: each.count("."))
    # In order, because Python remembers a union by its branches, in the order in which it was first written.
    first, *others = sorted(set(said[place]))[:MOST_BRANCHES]
    return place, ", or ".join([first, *(each.removeprefix("Input should be ") for each in others)])


def _place(path: Sequence[int | str], body: Any, is_missing: bool) -> str:
    """Return the dotted place in a body of pydantic's path, which also names the branches of unions."""
    found: list[str] = []
    for part in path:
        try:
            body = body[part]
        except (LookupError, TypeError):
            continue
        found.append(str(part)[:MOST_NAME])
    return ".".join([*found, *([str(path[-1])] if is_missing else [])])


def code_and_param(message: str, fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return OpenAI's code of a message about a request with these fields, and the field that it is about."""
    if _TOO_LONG.search(message):
        return "context_length_exceeded", next((name for name in PROMPTS if name in fields), None)
    found = _FIELD.match(message)
    if (at := _PLACE.match(message)) and at[1] in fields:
        return "invalid_request", at[0]
    return "invalid_request", found[1] if found and found[1] in fields else None
