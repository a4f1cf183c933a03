"""The end of an engine, where SGLang's processes report each other's deaths."""

import os
import signal
from typing import Any

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin.worker.shutdown import shut_down


class Complaining:
    """Does as a rank does that loses another one to the shutdown, which real ranks rarely have the time for."""

    def shutdown(self) -> None:
        os.kill(os.getpid(), signal.SIGQUIT)


def test_a_rank_that_complains_of_the_shutdown_does_not_end_the_worker() -> None:
    complaints: list[int] = []
    engine: Any = Complaining()
    signal.signal(signal.SIGQUIT, lambda number, _: complaints.append(number))  # SGLang's would kill all processes
    try:
        shut_down(engine)
        assert (complaints, signal.getsignal(signal.SIGQUIT)) == ([], signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
