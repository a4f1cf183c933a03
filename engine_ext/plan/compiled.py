"""Loops over arrays as machine code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba

Args = ParamSpec("Args")
Result = TypeVar("Result")


def compiled(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """The function compiled on first use and kept on disk, beside its file or in the user's cache.

    It runs without the interpreter's lock. Where nothing can be kept every process compiles for itself.
    """
    try:
        dispatcher: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder that this user may write
        return numba.njit(nogil=True)(function)
    # A private place of numba's, which a test watches. Numba itself asks only whether the function's own file has
    # changed, not those of the functions and constants that it compiles into it.
    dispatcher._cache._cache_file._source_stamp = SOURCES
    return dispatcher


def _stamp_of_sources() -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of every file of the rooms that compile."""
    files = sorted(Path(__file__).parents[1].glob("*/*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


SOURCES = _stamp_of_sources()
