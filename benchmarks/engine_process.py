"""An SGLang engine in a process of its own, for tests and benchmarks.

SGLang kills the process that holds an engine when a part of the engine dies, and so does our watch (plugin/pulse.py).
Here that process holds nothing else. It is forked from one that has imported SGLang, because the imports take most of
an engine's start.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import cloudpickle

from benchmarks.owner import end_with

CLOSE_S = 60.0  # for an engine's own end, after which it is killed
TAIL = 4000  # characters of a log that an error shows
IMPORTED = ["engine_ext.plugin.worker.host", "benchmarks.engine.bench_engine"]


class Closes(Protocol):
    """An EngineHost or a BenchEngine."""

    def close(self) -> None: ...


E = TypeVar("E", bound=Closes)
P = ParamSpec("P")
R = TypeVar("R")


class EngineDied(Exception):
    """The process of an engine has ended; the message says how, and shows the end of its log."""


class EngineProcess(Generic[E]):
    """An engine that lives in a child of this process, in an event loop of its own."""

    def __init__(self, make: Callable[[], E], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start the process, and return when `make` has returned the engine there.

        `log` gets what the engine's processes print. `environment`: more variables for them, which are set when SGLang
        has been imported. Raises what `make` raises, and EngineDied.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._log, self._failure, self._is_ended = log, "", False
        self._ours, theirs = context.Pipe()
        variables = {**os.environ, **(environment or {})}
        self._process = context.Process(target=_serve, args=(theirs, os.getpid(), str(log), variables), name="engine")
        self._process.start()
        theirs.close()
        try:
            self._call(make)
        except BaseException as error:
            error.add_note(f"the engine of process {self.pid} did not start")
            self._end(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of the process that holds the engine."""
        assert self._process.pid is not None
        return self._process.pid

    def do(self, function: Callable[Concatenate[E, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `await function(engine, ...)` returns in the engine's process, or raise what it raises.

        The function may be a closure; it gets copies of what it holds, and changes to them do not come back.
        """
        return self._call(function, *args, **kwargs)

    def close(self) -> None:
        """End the engine and all its processes. Raises EngineDied if its own end fails or takes longer than CLOSE_S."""
        if self._failure or self._is_ended:
            return
        with suppress(OSError):
            self._ours.close()
        self._end(CLOSE_S)
        if self._process.exitcode:
            raise EngineDied(self._death())

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = cloudpickle.dumps((function, args, kwargs))
        if self._failure:
            raise EngineDied(self._failure)
        try:
            answer = self._ask(call)
        except BaseException:  # Ctrl-C or a test's time limit: the answer would be taken for that of the next call
            self._failure = "the engine was ended, because a call of it was interrupted"
            self._end(0)
            raise
        if answer is None:
            self._end(CLOSE_S)
            self._failure = self._death()
            raise EngineDied(self._failure)
        error, value = cloudpickle.loads(answer)
        if error is not None:
            raise error
        return value

    def _ask(self, call: bytes) -> bytes | None:
        """Return the answer to a call; None if the process has ended."""
        try:
            self._ours.send_bytes(call)
            wait([self._ours, self._process.sentinel])
            return self._ours.recv_bytes() if self._ours.poll() else None
        except (EOFError, OSError):
            return None

    def _end(self, patience_s: float) -> None:
        """Wait so long for the process to end; then kill what is left of it and its descendants, in its session."""
        if self._is_ended:  # another session may have its number by now
            return
        self._is_ended = True
        self._process.join(patience_s)
        with suppress(ProcessLookupError):  # it has no session yet, or nothing is left of it
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _death(self) -> str:
        code = self._process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = self._log.read_text(errors="replace")[-TAIL:] if self._log.exists() else ""
        return f"the engine of process {self.pid} died {how}; the end of {self._log}:\n{said}"


def _serve(pipe: Connection, owner: int, log: str, environment: dict[str, str]) -> None:
    """Make an engine, and answer calls until the pipe is closed."""
    os.setsid()
    os.register_at_fork(after_in_child=pipe.close)  # or a part of the engine that outlives this process keeps it open
    for number in (signal.SIGINT, signal.SIGQUIT):  # which a shell ignores for what it starts in the background
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(file, standard)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    # Only what differs: SGLang's names of processes are written where the first environment lies.
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    threading.Thread(target=end_with, args=(owner,), daemon=True).start()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    make, _, _ = cloudpickle.loads(pipe.recv_bytes())
    try:
        engine = make()
    except Exception as error:
        pipe.send_bytes(_as_bytes(error))
        os._exit(0)  # an ordinary end would wait for processes that are left of the engine
    pipe.send_bytes(cloudpickle.dumps((None, None)))
    code = 1
    try:
        loop.run_until_complete(_answer(pipe, engine))
        engine.close()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _answer(pipe: Connection, engine: Any) -> None:
    """Answer one call after the other. Between two of them the loop runs on, in which SGLang hears of its dead."""
    while True:
        try:
            call = await asyncio.to_thread(pipe.recv_bytes)
        except EOFError:
            return
        try:
            function, args, kwargs = cloudpickle.loads(call)
            answer = cloudpickle.dumps((None, await function(engine, *args, **kwargs)))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # the failure of a test is no Exception
            answer = _as_bytes(error)
        await asyncio.to_thread(pipe.send_bytes, answer)


def _as_bytes(error: BaseException) -> bytes:
    """Return an error to be raised in the process that asked, where its traceback is a note of it."""
    described = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"In the engine's process:\n{described}")
        answer = cloudpickle.dumps((error, None))
        cloudpickle.loads(answer)
    except Exception:  # some errors cannot be made from their parts
        answer = cloudpickle.dumps((RuntimeError(described), None))
    return answer
