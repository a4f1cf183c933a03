"""Limits the JSON schemas of a request: of some, the grammar takes minutes, gigabytes, or seconds for each token.

Values beyond each limit were seen to hang SGLang's scheduler or its worker for all requests (docs/reliability.md).
"""

import re
from typing import Any

from service.requests.patterns import risk
from service.requests.schema_roles import Role

SCHEMA_CHARACTERS = 64 * 1024
SCHEMA_DEPTH = 128  # levels of the JSON, two for each level of the schema
MOST_ENUM = 1000
MOST_PROPERTIES = 256
MOST_COUNTED_PROPERTIES = 64  # of an object with minProperties or maxProperties
MOST_SCHEMAS = 1000  # in a schema, true and false among them; the check of each takes 0.2 ms
MOST_NUMBERS = 32  # numbers with bounds
MOST_LENGTHS = 32  # patterns and bounds of lengths
MOST_DIFFERENT_LENGTHS = 8  # of these; each different one takes seconds to compile
MOST_WAYS = 256  # choices and references
MOST_TYPES = 8
TO_DEFINITION = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
_CHOICES = ("anyOf", "oneOf", "allOf")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = {"pattern": str, "minLength": int, "maxLength": int}


def schema_risk(schema: Any, has_data: bool = True) -> str | None:
    """Return why a JSON schema is refused, or None: its grammar would take minutes, gigabytes, or seconds per token.

    `has_data`: examples and the like are no schemas. Where a reference may lead to one, all is judged as if it were.
    """
    depth, left = 0, [(schema, 1, Role.SCHEMA)]
    counts: dict[str, int] = dict.fromkeys(("characters", "schemas", "properties", "numbers", "lengths", "ways"), 0)
    different = set[Any]()
    while left:
        value, at, role = left.pop()
        depth = max(depth, at)
        if depth > SCHEMA_DEPTH:
            return f"has a schema whose JSON is nested more than {SCHEMA_DEPTH} levels deep"
        if isinstance(value, dict):
            if has_data and _leads_elsewhere(value.get("$ref")):
                return schema_risk(schema, has_data=False)
            if role is Role.SCHEMA and (reason := _object_risk(value, counts, different)):
                return reason
            counts["schemas"] += role is Role.SCHEMA
            counts["characters"] += sum(map(len, value)) + 4 * len(value)
            left += [(each, at + 1, role.of(name) if has_data else role) for name, each in value.items()]
        elif role is Role.MAP:
            return "has a schema whose properties or definitions are no object"
        elif isinstance(value, list):
            kinds = set(map(type, value))
            if role is Role.SCHEMA and kinds - {str} and kinds - {dict, bool}:
                counts["schemas"] += len(value)  # which jsonschema compares each with each
            counts["characters"] += 2 * len(value)
            left += [(each, at + 1, role) for each in value[:SCHEMA_CHARACTERS]]
        else:
            counts["schemas"] += role is Role.SCHEMA and isinstance(value, bool)
            counts["characters"] += len(value) if isinstance(value, str) else 8
        if counts["characters"] > SCHEMA_CHARACTERS:
            return f"has a schema larger than {SCHEMA_CHARACTERS // 1024} KiB"
    return _too_many(counts)


def _too_many(counts: dict[str, int]) -> str | None:
    for name, about, most in (
        ("schemas", "schemas in it", MOST_SCHEMAS),
        ("properties", "properties", MOST_PROPERTIES),
        ("numbers", "numbers with bounds", MOST_NUMBERS),
        ("ways", "choices and references", MOST_WAYS),
    ):
        if counts[name] > most:
            return f"has a schema with {counts[name]} {about}; at most {most} are allowed"
    return None


def _leads_elsewhere(ref: Any) -> bool:
    """Return whether a reference leads to anything but a definition, such as to data or to a map of definitions."""
    return isinstance(ref, str) and not TO_DEFINITION.fullmatch(ref)


def _object_risk(value: dict[str, Any], counts: dict[str, int], different: set[Any]) -> str | None:
    """Return why one object of a schema is refused, or None.

    Adds to the `counts` of the whole schema, and to its `different` lengths and patterns.
    """
    properties, enum, kind = value.get("properties"), value.get("enum"), value.get("type")
    counts["properties"] += len(properties) if isinstance(properties, dict) else 0
    counts["numbers"] += any(isinstance(value.get(name), int | float) for name in _NUMBERS)
    counts["lengths"] += sum(isinstance(value.get(name), kind) for name, kind in _LENGTHS.items())
    named = value.get("patternProperties")
    counts["lengths"] += len(named) if isinstance(named, dict) else 0
    counts["lengths"] += isinstance(value.get("format"), str)
    if counts["lengths"] > MOST_LENGTHS:  # checked before the patterns are parsed
        return f"has a schema with more than {MOST_LENGTHS} patterns and length bounds"
    counts["ways"] += isinstance(value.get("$ref"), str)
    counts["ways"] += sum(len(value[each]) for each in _CHOICES if isinstance(value.get(each), list))
    if any(isinstance(value.get(each), int) for each in ("minLength", "maxLength")):
        different.add((str(value.get("minLength")), str(value.get("maxLength"))))
    texts = (value.get("pattern"), value.get("format"), *(named if isinstance(named, dict) else ()))
    different.update(each for each in texts if each and isinstance(each, str))
    if len(different) > MOST_DIFFERENT_LENGTHS:
        return f"has a schema with more than {MOST_DIFFERENT_LENGTHS} different patterns and length bounds"
    counted = any(value.get(each) is not None for each in ("minProperties", "maxProperties"))
    if counted and isinstance(properties, dict) and len(properties) > MOST_COUNTED_PROPERTIES:
        return f"has an object with minProperties or maxProperties and more than {MOST_COUNTED_PROPERTIES} properties"
    if empty := [each for each in ("enum", "type", *_CHOICES) if value.get(each) == []]:
        return f"has an empty '{empty[0]}', so that no answer can meet it"
    if isinstance(enum, list) and len(enum) > MOST_ENUM:
        return f"has an enum with {len(enum)} values; at most {MOST_ENUM} are allowed"
    if isinstance(kind, list) and (len(kind) > MOST_TYPES or not all(isinstance(each, str) for each in kind)):
        return f"has a 'type' that is neither a name nor a list of at most {MOST_TYPES} names"
    patterns = [value.get("pattern"), *(named if isinstance(named, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and (reason := risk(pattern)):
            return f"has the pattern {pattern[:64]!r}, which is not allowed: {reason}"
    return None
