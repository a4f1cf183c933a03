"""Forks SGLang's processes on a CPU instead of starting them, so that they need not import all of SGLang again.

These imports take half of a start there. With a GPU, a process that has used CUDA cannot be forked.
"""

import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine


class ForkingEngine(Engine):
    """An engine whose scheduler and detokenizer are forked from this process, which has all their imports."""

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
    torch.set_num_threads(1)  # a forked process inherits it; a started one would read OMP_NUM_THREADS
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
