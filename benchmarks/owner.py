"""Ends processes whose owner has died: an engine that nobody uses any more holds memory and cores."""

import os
import select
import signal
from contextlib import suppress


def end_with(owner: int) -> None:
    """Kill this session when the process that started it ends, however it ends."""
    with suppress(ProcessLookupError):
        watched = select.poll()
        watched.register(os.pidfd_open(owner), select.POLLIN)
        watched.poll()
    os.killpg(0, signal.SIGKILL)
