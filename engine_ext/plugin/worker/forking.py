"""SGLang's processes forked instead of started, on a CPU: each would import all of SGLang again otherwise.

Half of what a start costs there is these imports. With a GPU no process can be forked once CUDA was asked for anything.
"""

import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine


class ForkingEngine(Engine):
    """Scheduler and detokenizer are forked from this process, which has imported all that they need."""

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        with _by_fork():
            return super()._launch_scheduler_processes(*args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
        with _by_fork():
            return super()._launch_detokenizer_subprocesses(*args, **kwargs)


@contextmanager
def _by_fork() -> Generator[None, None, None]:
    before = multiprocessing.get_start_method()
    torch.set_num_threads(1)  # a forked process takes it over, where one that starts would read OMP_NUM_THREADS
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
