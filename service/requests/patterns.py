"""Decides whether a regular expression in a JSON schema can be matched token by token in bounded time.

A grammar engine keeps every way in which the text so far can be parsed. If a repeat is inside a repeat and nothing
separates their iterations, as in `(a+)+`, the number of ways keeps growing: the pattern compiles at once, and then each
token takes seconds in the scheduler's own thread, for all requests.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache, reduce
from operator import or_
from typing import Any

MOST_CHARACTERS = 256
MOST_REPEATS = 8
MOST_COPIES = 256  # that all repeats with bounds expand to
# Sets of characters are numbers: a bit for each of the first 256, and one for all others.
_OTHERS = 256
_ANY = (2 << _OTHERS) - 1
_parse: Any = re._parser.parse  # type: ignore[attr-defined]  # the parser of `re` itself, which has no public name
_ONE = ("LITERAL", "NOT_LITERAL", "ANY", "ANY_ALL", "IN")  # items that match exactly one character
_CATEGORIES = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda each: each.isalnum() or each == "_"}


def risk(pattern: str) -> str | None:
    """Return why the pattern is refused, or None if it may run."""
    if len(pattern) > MOST_CHARACTERS:
        return f"it is longer than {MOST_CHARACTERS} characters"
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = list(_parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return f"it cannot be parsed: {error}"
    repeats = list(_repeats(tree, 1))
    if len(repeats) > MOST_REPEATS:
        return f"it has more than {MOST_REPEATS} repeats"
    if sum(copies for _, copies in repeats if copies > 1) > MOST_COPIES:
        return f"its bounded repeats expand to more than {MOST_COPIES} copies"
    if any(_may_be_empty(inside) for inside, _ in repeats):
        return "it repeats something that may be empty, as in (a?)*"
    if any(_is_ambiguous(inside) for inside, _ in repeats):
        return "it has a repeat whose iterations are ambiguous, as in (a+)+ or (a|aa)*"
    return None


def _repeats(tree: list[Any], copies: int) -> Iterator[tuple[list[Any], int]]:
    """Yield the inside of each repeat with more than one iteration, and how many copies its bounds expand to."""
    for name, given in tree:
        if name is re._constants.ANY_ALL:  # type: ignore[attr-defined]
            continue
        if str(name) in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inside = given
            finite = int(most) if int(most) < 2**31 else int(least)
            inner = copies * max(finite, 1)
            if int(most) > 1:
                yield list(inside), inner
            yield from _repeats(list(inside), inner)
        else:
            for part in _parts(given):
                yield from _repeats(part, copies)


def _parts(given: Any) -> Iterator[list[Any]]:
    """Yield the patterns inside an item: a group, a choice or an assertion."""
    if isinstance(given, tuple | list):
        for each in given:
            if type(each).__name__ == "SubPattern":
                yield list(each)
            elif isinstance(each, list):
                yield from _parts(each)


def _is_ambiguous(round_: list[Any]) -> bool:
    """Return whether a text can be split in several ways into iterations of different lengths."""
    elastic = list(_elastic(round_))
    if not elastic:
        return False
    taken = reduce(or_, map(_characters, elastic))
    return not any(marks and not marks & taken for marks in map(_of_item, _flat(round_)))


def _elastic(tree: list[Any]) -> Iterator[list[Any]]:
    """Yield what gives iterations different lengths: repeats, options, and choices that may begin alike or be empty."""
    for name, given in tree:
        parts = list(_parts(given))
        is_repeat = str(name).endswith("_REPEAT")
        is_choice = str(name) == "BRANCH" and (any(map(_may_be_empty, parts)) or _overlap(map(_firsts, parts)))
        if is_choice or (is_repeat and given[0] != given[1]):
            yield [(name, given)]
        else:
            for part in parts:
                yield from _elastic(part)


def _may_be_empty(tree: list[Any]) -> bool:
    for name, given in tree:
        parts = list(_parts(given))
        if str(name).endswith("_REPEAT"):
            is_empty = given[0] == 0 or _may_be_empty(list(given[2]))
        elif str(name) == "BRANCH":
            is_empty = any(map(_may_be_empty, parts))
        elif str(name) in ("SUBPATTERN", "ATOMIC_GROUP"):
            is_empty = all(map(_may_be_empty, parts))
        else:
            is_empty = str(name) not in _ONE
        if not is_empty:
            return False
    return True


def _firsts(tree: list[Any]) -> int:
    """Return the characters with which a match can begin."""
    found = 0
    for item in tree:
        own = _of_item(item)
        found |= reduce(or_, map(_firsts, _parts(item[1])), 0) if own is None else own
        if not _may_be_empty([item]):
            break
    return found


def _overlap(sets: Iterable[int]) -> bool:
    seen = 0
    for each in sets:
        if each & seen:
            return True
        seen |= each
    return False


def _flat(tree: list[Any]) -> Iterator[Any]:
    """Yield the items that occur in every iteration, including those inside groups."""
    for name, given in tree:
        if str(name) == "SUBPATTERN":
            yield from _flat(list(given[-1]))
        else:
            yield name, given


def _characters(tree: list[Any]) -> int:
    """Return every character that can occur in a match."""
    found = 0
    for name, given in tree:
        own = _of_item((name, given))
        if own is not None:
            found |= own
        elif str(name).endswith("_REPEAT"):
            found |= _characters(list(given[2]))
        else:
            found = reduce(or_, map(_characters, _parts(given)), found)
    return found


def _of_item(item: Any) -> int | None:
    """Return the characters of an item that matches exactly one; None for any other item."""
    name, given = str(item[0]), item[1]
    if name == "LITERAL":
        return _between(given, given)
    if name == "NOT_LITERAL":
        return _negated(_between(given, given))
    if name in ("ANY", "ANY_ALL"):
        return _ANY
    if name != "IN":
        return None
    found = 0
    for kind, what in given:
        match str(kind):
            case "LITERAL":
                found |= _between(what, what)
            case "RANGE":
                found |= _between(*what)
            case "CATEGORY":
                found |= _category(str(what))
            case _:
                continue
    is_negated = bool(given) and str(given[0][0]) == "NEGATE"
    return _negated(found) if is_negated else found


def _between(first: int, last: int) -> int:
    return (2 << min(last, _OTHERS)) - (1 << min(first, _OTHERS))


def _negated(characters: int) -> int:
    return _ANY & ~characters | 1 << _OTHERS


@cache
def _category(name: str) -> int:
    """Return the characters of a class that a pattern can name, such as CATEGORY_NOT_WORD."""
    test = _CATEGORIES.get(name.rsplit("_", 1)[-1])
    if test is None:
        return _ANY
    has = sum(1 << each for each in range(128) if test(chr(each)))  # as JSON schemas mean them
    return _negated(has) if "NOT" in name else has
