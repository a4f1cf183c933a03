"""Compiles loops over arrays to machine code."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import numba

Args = ParamSpec("Args")
Result = TypeVar("Result")
ROOMS = ("costs", "plan", "scan", "coserve", "simulate")  # the packages whose functions are compiled


def cache_folder() -> Path:
    """Return the folder for machine code: the user's cache outlives an installation and needs no writable source.

    NUMBA_CACHE_DIR overrides it. If the user's cache is not writable, it is the system's folder for temporary files.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:  # which other programs may use too
        return Path(named) / "batchweave"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (home / "batchweave" / "numba", Path(tempfile.gettempdir()) / f"batchweave-numba-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # Code in this folder is executed, so no other user may have put it there.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix="batchweave-numba-"))


def compiled(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Compile a function on first use and cache it in `FOLDER`; it runs without the interpreter's lock.

    If no folder is writable, every process compiles for itself.
    """
    return _compiled(function, nogil=True)


def brief(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Compile a function that each step calls and that takes microseconds; it keeps the interpreter's lock.

    A thread that gives the lock up while another one plans must wait until that one gives it up in turn.
    """
    return _compiled(function, nogil=False)


def _compiled(function: Callable[Args, Result], nogil: bool) -> Callable[Args, Result]:
    try:
        dispatcher: Any = numba.njit(cache=True, nogil=nogil, no_cfunc_wrapper=True)(function)
    except RuntimeError:  # this user may write to no folder
        return numba.njit(nogil=nogil, no_cfunc_wrapper=True)(function)
    # A private attribute of numba's, which a test watches. Numba itself checks only whether the function's own file has
    # changed, not the files of the functions and constants that it compiles into it.
    dispatcher._cache._cache_file._source_stamp = SOURCES
    return dispatcher


def _stamp_of_sources() -> int:
    """Return a checksum of all sources that are compiled or compiled with, whatever their modification times."""
    stamp = 0
    for room in (".", *ROOMS):
        for file in sorted((Path(__file__).parent / room).glob("*.py")):
            stamp = crc32(file.read_bytes(), crc32(file.name.encode(), stamp))
    return stamp


def _folder_of_sources() -> Path:
    """Return the folder of these sources alone: numba cannot read an index that names a class which is gone."""
    folder = cache_folder() / f"{SOURCES:08x}"
    with suppress(OSError):  # then numba finds out too, and each process compiles for itself
        folder.mkdir(parents=True, exist_ok=True)
    return folder


SOURCES = _stamp_of_sources()
FOLDER = _folder_of_sources()
numba.config.CACHE_DIR = str(FOLDER)  # type: ignore[attr-defined]
