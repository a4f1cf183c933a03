"""Finds the JSON that a request asks for."""

from typing import Any

import msgspec


def asked_json(body: dict[str, Any]) -> Any:
    """Return the schema that the answer must meet; None for any text."""
    given = body.get("response_format") or _member(body.get("text"), "format")
    kind = _member(given, "type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        return _member(_member(given, "json_schema") or given, "schema")
    plain = body.get("json_schema")  # SGLang's own
    if isinstance(plain, str):
        try:
            return msgspec.json.decode(plain)
        except (msgspec.DecodeError, RecursionError):
            return None
    return None


def _member(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, dict) else None
