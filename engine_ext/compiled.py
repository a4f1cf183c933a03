"""Compiles loops over arrays to machine code."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar
from zlib import crc32

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

Args = ParamSpec("Args")
Result = TypeVar("Result")
ROOMS = ("costs", "plan", "scan", "coserve", "step", "simulate")  # the packages whose functions are compiled


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


class _Locator(UserProvidedCacheLocator):
    """Finds machine code by the sources' checksum and the function's room, whatever folder the sources lie in.

    Numba's own locators name that folder, so that each clone would compile again, and check only whether the function's
    own file has changed, not the files of the functions and constants that are compiled into it.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        room = Path(self._py_file).parent
        if Path(__file__).parent in (room, room.parent):
            return str(FOLDER / room.name)
        return str(FOLDER / f"{room.name}-{_stamp_of(room, 0):08x}")  # of files that SOURCES does not cover

    def get_source_stamp(self) -> Any:
        return SOURCES

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator | None":
        found = cls(py_func, py_file)
        try:
            found.ensure_cache_path()
        except OSError:  # this user may not write there
            return None
        return found


class _Impl(CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Locator]


class _Cache(FunctionCache):
    _impl_class = _Impl

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save machine code, one process at a time: numba would let two signatures have one file."""
        with suppress(OSError), (FOLDER / "saves").open("w") as lock:  # on a full disk too, each compiles for itself
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().save_overload(sig, data)


def _compiled(function: Callable[Args, Result], nogil: bool) -> Callable[Args, Result]:
    dispatcher: Any = numba.njit(nogil=nogil, no_cfunc_wrapper=True)(function)
    with suppress(RuntimeError):  # there is no locator; every process compiles for itself
        dispatcher._cache = _Cache(function)  # a private attribute of numba's, which a test watches
    return dispatcher


def _stamp_of_sources() -> int:
    """Return a checksum of all sources that are compiled or compiled with, whatever their modification times."""
    stamp = 0
    for room in (".", *ROOMS):
        stamp = _stamp_of(Path(__file__).parent / room, stamp)
    return stamp


@cache
def _stamp_of(room: Path, stamp: int) -> int:
    """Return a checksum of the sources in this folder, beginning with `stamp`."""
    for file in sorted(room.glob("*.py")):
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
