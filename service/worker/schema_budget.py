"""Validates an answer by a request's schema within a budget: a schema can be made to take hours on an answer."""

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry

from service.requests.schema_limits import TO_DEFINITION
from service.requests.schema_roles import Role

# Keywords that are applied to the choices of one answer, and members that they look at: tens of milliseconds at most.
MOST_CHECKS = 5000
CHARACTERS = 500  # of a text that is repeated in an error, which count as one check
KNOWN_SCHEMAS = 64
# The grammar enforces patterns, and one can be made to take hours here; formats are annotations; and looking for equal
# items takes the square of their number.
LEFT_OUT = ("pattern", "patternProperties", "format", "uniqueItems")
# One check of these follows references and patterns by itself, which can take days; the others jump to anywhere.
UNJUDGED = frozenset(
    {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$anchor", "$id"}
)
_budget = threading.local()  # `left`: for the answer that a thread judges now; `characters`: of the text it looks at


class TooMuch(Exception):
    """The budget of an answer is used up: nobody can say whether it is valid."""


def begin() -> None:
    """Give this thread the budget for another answer."""
    _budget.left = MOST_CHECKS


def first_error(schema: bytes, found: Any, characters: int) -> ValidationError | None:
    """Return the first fault of what was found in a text of so many characters. Raises TooMuch.

    `schema`: as JSON.
    """
    _budget.characters = characters
    if (validator := _validator(schema)) is None:
        raise TooMuch
    return next(validator.iter_errors(found), None)


@lru_cache(KNOWN_SCHEMAS)
def _validator(schema: bytes) -> Any:
    """Return the validator of a schema, for which nothing is fetched; None if its checks are not bounded."""
    found = msgspec.json.decode(schema)
    if isinstance(found, dict):
        found.pop("$id", None)  # of the whole: references to definitions mean the same without it
    return _Budgeted(found, registry=Registry()) if _is_bounded(found) else None


def _is_bounded(schema: Any) -> bool:
    """Return whether each check of a schema looks at its own members alone."""
    left = [(schema, Role.SCHEMA)]
    while left:
        value, role = left.pop()
        if role is Role.MAP and not isinstance(value, dict):
            return False  # a reference leads into it all the same
        if isinstance(value, dict):
            if role is Role.SCHEMA and not _is_plain(value):
                return False
            left += [(each, role.of(name)) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(each, role) for each in value]
    return True


def _is_plain(schema: dict[str, Any]) -> bool:
    ref = schema.get("$ref", "#")
    leads_to_definition = isinstance(ref, str) and TO_DEFINITION.fullmatch(ref) is not None
    runs_patterns = "patternProperties" in schema and "additionalProperties" in schema
    # Each check would compare them whole.
    values = [schema.get("const"), *(schema["enum"] if isinstance(schema.get("enum"), list) else ())]
    compares = any(isinstance(each, list | dict) and each for each in values)
    return leads_to_definition and not (runs_patterns or compares) and UNJUDGED.isdisjoint(schema)


def _nothing(*_: Any) -> Iterator[Any]:
    """Find no error, for what is left out."""
    return iter(())


def _take(count: int) -> None:
    _budget.left -= count
    if _budget.left < 0:
        raise TooMuch


def _counted(check: Any) -> Any:
    """Let a keyword's check take from the budget: one, one for each member that it may look at, and for its errors."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _take(1 + sum(len(each) for each in (value, instance) if isinstance(each, list | dict)))
        for error in check(validator, value, instance, schema) or ():
            _take(1 + len(error.message) // CHARACTERS)  # it repeats what was judged, however long that is
            yield error

    return checked


_CHECKS = {
    name: _nothing if name in LEFT_OUT else _counted(check) for name, check in Draft202012Validator.VALIDATORS.items()
}
_Budgeted: Any = extend(Draft202012Validator, _CHECKS)
_evolve, _descend, _iter_errors = _Budgeted.evolve, _Budgeted.descend, _Budgeted.iter_errors


def evolve(validator: Any, **changes: Any) -> Any:
    """Keep the budget in each part of a schema: one that names its draft would be judged by that draft's checks."""
    schema = changes.get("schema", validator.schema)
    if isinstance(schema, dict) and "$schema" in schema:
        changes["schema"] = {name: value for name, value in schema.items() if name != "$schema"}
    return _evolve(validator, **changes)


def descend(validator: Any, instance: Any, schema: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Let a schema that allows nothing take from the budget too: it has no keyword, and its error repeats the text."""
    if schema is False:
        _take(1 + _budget.characters // CHARACTERS)
    return _descend(validator, instance, schema, *args, **kwargs)


def iter_errors(validator: Any, instance: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Do the same where a keyword asks only whether something is valid."""
    if validator.schema is False:
        _take(1 + _budget.characters // CHARACTERS)
    return _iter_errors(validator, instance, *args, **kwargs)


_Budgeted.evolve, _Budgeted.descend, _Budgeted.iter_errors = evolve, descend, iter_errors
