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

# Keywords that are applied to the choices of one answer, and members that they look at: tens of milliseconds at most.
MOST_CHECKS = 5000
CHARACTERS = 500  # of a text that is repeated in an error, which count as one check
KNOWN_SCHEMAS = 64
# The grammar enforces patterns, and one can be made to take hours here; formats are annotations; and looking for equal
# items takes the square of their number.
LEFT_OUT = ("pattern", "patternProperties", "format", "uniqueItems")
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
    return next(_validator(schema).iter_errors(found), None)


@lru_cache(KNOWN_SCHEMAS)
def _validator(schema: bytes) -> Any:
    """Return the validator of a schema, for which nothing is fetched."""
    return _Budgeted(msgspec.json.decode(schema), registry=Registry())


def _take(count: int) -> None:
    _budget.left -= count
    if _budget.left < 0:
        raise TooMuch


def _counted(check: Any) -> Any:
    """Let a keyword's check take from the budget: one, one for each member that it may look at, and for its errors."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _take(1 + sum(len(each) for each in (value, instance) if isinstance(each, list | dict)))
        for error in check(validator, value, instance, schema) or ():
            _take(len(error.message) // CHARACTERS)  # it repeats what was judged, however long that is
            yield error

    return checked


_CHECKS = {name: None if name in LEFT_OUT else _counted(each) for name, each in Draft202012Validator.VALIDATORS.items()}
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
