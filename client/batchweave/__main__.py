"""Runs the command line: `batchweave`, or `python -m batchweave`. Ctrl-C ends any command with 130 and one line."""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


def main() -> None:
    # Imports take a moment, sometimes seconds, in which there is nothing to lose and nobody to catch an exception.
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, _end)
    from batchweave.table import command_of_this_line
    from batchweave.terminal import Interrupted

    command = command_of_this_line()
    signal.signal(signal.SIGINT, before)
    try:
        command()
    except Interrupted:
        raise
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stderr.write("interrupted\n")
        raise


def _end(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
