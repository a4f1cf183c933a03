"""Knows what of a JSON schema SGLang's grammars do not enforce.

It was found by trial with xgrammar 0.2.1, which SGLang 0.5.17 uses, as tests/engine/test_unenforced.py repeats.
"""

from collections.abc import Iterator
from typing import Any

from service.requests.schema_roles import Role

IGNORED = "the grammar does not enforce it"
ROUGH = "the grammar enforces it only roughly, and may accept some numbers outside"
EXACT = 100  # a grammar enforces bounds of whole numbers exactly, if they are no farther from 0

_NEVER = (
    *("contains", "contentEncoding", "contentMediaType", "contentSchema", "dependencies", "dependentRequired"),
    *("dependentSchemas", "$dynamicRef", "if", "multipleOf", "not", "uniqueItems"),
)
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_LENGTHS = ("maxLength", "minLength")
_STRINGS = ("format", *_LENGTHS, "pattern")
_ARRAYS, _OBJECTS = ("maxItems", "minItems"), ("maxProperties", "minProperties", "required")
_SHAPES = frozenset({"additionalProperties", "items", "patternProperties", "prefixItems", "properties"})
_UNTYPED = (*_NUMBERS, *_STRINGS, *_ARRAYS, *_OBJECTS, "patternProperties", "propertyNames")
_FORMATS = (
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer"),
    *("time", "uri", "uri-reference", "uri-template", "uuid"),
)
# Of these in one schema the first alone is heard, and nothing beside it.
_INSTEAD = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


def unenforced(schema: Any) -> dict[str, str]:
    """Return the keywords of a schema that answers may break, each with IGNORED or ROUGH."""
    found: dict[str, str] = {}
    left = [(schema, Role.SCHEMA)]
    while left:
        value, role = left.pop()
        if isinstance(value, dict):
            if role is Role.SCHEMA:
                found |= dict(_of_one(value))
                if isinstance(names := value.get("propertyNames"), dict):
                    value = {**value, "propertyNames": {"type": "string", **names}}
            left += [(each, role.of(name)) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(each, role) for each in value]
    return found


def _of_one(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of one object of a schema, without those inside it."""
    has = {name for name, value in schema.items() if value not in (None, False, [], {}) or name == "const"}
    yield from ((name, IGNORED) for name in _NEVER if name in has)
    heard = [name for name in _INSTEAD if name in has]
    if heard:
        among = schema[heard[0]]
        if heard[0] == "allOf" and isinstance(among, list) and len(among) > 1:
            yield "allOf", IGNORED
        hidden = (*heard[1:], *_UNTYPED, *_SHAPES, *(("type",) if heard[0] == "$ref" else ()))
        yield from ((name, IGNORED) for name in hidden if name in has)
        return
    if schema.get("type") is None and has.isdisjoint(_SHAPES - {"patternProperties"}):
        yield from ((name, IGNORED) for name in _UNTYPED if name in has)
        return
    needed, names = schema.get("required"), schema.get("properties")
    known = names if isinstance(names, dict) else {}
    if isinstance(needed, list) and any(not isinstance(each, str) or each not in known for each in needed):
        yield "required", IGNORED
    yield from _of_texts(schema, has)
    if not _is_exact(schema):
        yield from ((name, ROUGH) for name in _NUMBERS if name in schema)


def _of_texts(schema: dict[str, Any], has: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of texts that another one hides: a format hides a pattern, and both hide lengths."""
    is_known = isinstance(schema.get("format"), str) and schema["format"] in _FORMATS
    if "format" in has and not is_known:
        yield "format", IGNORED
    if is_known and "pattern" in has:
        yield "pattern", IGNORED
    if is_known or "pattern" in has:
        yield from ((name, IGNORED) for name in _LENGTHS if name in has)


def _is_exact(schema: dict[str, Any]) -> bool:
    """Return whether the bounds of a number hold, or it has none."""
    bounds = {name: schema[name] for name in _NUMBERS if name in schema}
    if not bounds:
        return True
    if not _is_whole(schema.get("type")) or not all(isinstance(each, int) for each in bounds.values()):
        return False
    lower = [value + (name[0] == "e") for name, value in bounds.items() if name in ("minimum", "exclusiveMinimum")]
    upper = [value - (name[0] == "e") for name, value in bounds.items() if name in ("maximum", "exclusiveMaximum")]
    if len(lower) == len(upper) == 1:
        return max(abs(lower[0]), abs(upper[0])) <= EXACT
    return (not upper and len(lower) == 1 and not 2 <= lower[0] <= 9) or (
        not lower and len(upper) == 1 and 0 <= upper[0] <= EXACT
    )


def _is_whole(kind: Any) -> bool:
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)
