"""Looks at processes that may end at any moment."""

import psutil


def words_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty once it has ended, also if nobody has waited for it yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
