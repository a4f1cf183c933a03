"""Defines array types, and records of named numbers that machine code changes in place.

Compiled functions take arrays and named tuples, but cannot set the fields of a named tuple. A record has named fields
that they can set: `totals[0].clock += 1` works in machine code, in Python and under the type checker, and a misspelt
field is an error in all three. A single record is an array of one, because numba takes a bare record, or NumPy's
`recarray`, many times as slowly at each call.
"""

from typing import Any, Protocol, TypeVar, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Fields = TypeVar("Fields")
Row = TypeVar("Row", covariant=True)


class Records(Protocol[Row]):
    """An array of records: `records[k].field` is one number; in Python, `column(records, "field")` is all of them."""

    def __getitem__(self, at: int, /) -> Row: ...

    def __len__(self) -> int: ...


def new_records(kind: type[Fields], count: int, integer: type[np.signedinteger[Any]] = np.int64) -> Records[Fields]:
    """Return `count` records of zeros. Their fields are the annotations of `kind`, int or float; floats are float64."""
    types = {int: integer, float: np.float64}
    fields = [(name, types[hint]) for name, hint in get_type_hints(kind).items()]
    return cast(Records[Fields], np.zeros(count, dtype=np.dtype((np.record, fields))))


def column(records: Records[object], field: str) -> NDArray[Any]:
    """Return one field of all records, as an array that shares their memory."""
    return cast(NDArray[Any], cast(Any, records)[field])
