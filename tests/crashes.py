"""Lets a segmentation fault in any thread print where it happened.

The interpreter's handler has a stack of its own in the main thread only. Elsewhere, a fault that spoils the stack ends
the process without a word.
"""

import ctypes
import mmap
import threading

BYTES = 64 * 1024
DISABLED = 2  # SS_DISABLE


class _Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t))


def install() -> None:
    """Give each thread that starts from now on, and runs a target, a stack for its signals (sigaltstack)."""
    libc, begin = ctypes.CDLL(None), threading.Thread.run

    def run(self: threading.Thread) -> None:
        memory = mmap.mmap(-1, BYTES)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc.sigaltstack(ctypes.byref(_Stack(at, 0, BYTES)), None)
        try:
            begin(self)
        finally:
            libc.sigaltstack(ctypes.byref(_Stack(None, DISABLED, 0)), None)

    threading.Thread.run = run
