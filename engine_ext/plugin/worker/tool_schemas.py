"""Checks the schemas of tools in SGLang's place: once for equal ones, and with a short message.

A check takes 0.17 ms a schema, which each line of a file would pay again, and its message quotes the whole of what is
wrong: megabytes.
"""

import json
from collections import OrderedDict
from hashlib import sha256
from typing import Any, ClassVar

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from sglang.srt.entrypoints.openai import serving_chat

from engine_ext.plugin.worker.refusals import MOST_SAID

MOST_KNOWN = 4096  # schemas
MANY = 1000  # objects, lists and their entries in tools, whose check takes as long as a step


class ToolSchemas:
    """Has the one method of jsonschema's validators that SGLang calls."""

    _known: ClassVar[OrderedDict[bytes, str | None]] = OrderedDict()

    @classmethod
    def check_schema(cls, schema: Any) -> None:
        """Raise SchemaError if it is no JSON schema. Whether its patterns compile, the grammar finds out."""
        key = sha256(json.dumps(schema).encode()).digest()
        try:
            said = cls._known[key]
        except KeyError:
            said = cls._known[key] = _fault(schema)
            if len(cls._known) > MOST_KNOWN:
                cls._known.popitem(last=False)
        if said is not None:
            raise SchemaError(said)


def _fault(schema: Any) -> str | None:
    try:
        Draft202012Validator(Draft202012Validator.META_SCHEMA).validate(schema)
    except ValidationError as error:
        return f"{error.message[:MOST_SAID]} (at {error.json_path[:MOST_SAID]})"
    except RecursionError:
        return "it is nested too deep"
    return None


def are_many(tools: Any) -> bool:
    """Return whether the check of a body's tools takes long."""
    count, left = 0, [tools]
    while left and count <= MANY:
        each = left.pop()
        if isinstance(each, dict | list):
            count += 1 + len(each)
            left += each.values() if isinstance(each, dict) else each
    return count > MANY


def install() -> None:
    """Let SGLang's chats check by this."""
    serving_chat.Draft202012Validator = ToolSchemas  # pyright: ignore[reportAttributeAccessIssue]
