"""Knows where a JSON schema has schemas, and where it has data."""

from enum import Enum

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"examples", "default", "const", "enum"})


class Role(Enum):
    """What a value of a schema is: a schema, a map of schemas by any names, or data."""

    SCHEMA, MAP, DATA = range(3)

    def of(self, name: str) -> "Role":
        """Return what this key's value is."""
        if self is not Role.SCHEMA:
            return Role.SCHEMA if self is Role.MAP else Role.DATA
        return Role.MAP if name in _MAPS else Role.DATA if name in _DATA else Role.SCHEMA
