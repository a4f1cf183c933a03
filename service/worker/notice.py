"""Asks a command whether this machine is about to be taken away, as clouds tell it of spot machines."""

import asyncio
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import structlog

from service.errors import StartError

ASK_S = 5.0  # between two questions; clouds give notice from half a minute to two minutes before
ANSWER_S = 4.0
log = structlog.get_logger()


def words(command: str) -> list[str]:
    """Return the command's words, as a shell reads them. Raises StartError."""
    try:
        found = shlex.split(command)
    except ValueError as error:
        raise StartError(f"BATCHWEAVE_NOTICE_COMMAND: {error}: {command!r:.80}") from error
    if not found:
        raise StartError("BATCHWEAVE_NOTICE_COMMAND is empty. Name a command, or unset it.")
    return found


@asynccontextmanager
async def watched(command: list[str], stop: asyncio.Event) -> AsyncGenerator[None]:
    """Watch for a notice during the block, if there is a command. What the block raises stays as it is."""
    task = asyncio.create_task(watch(command, stop)) if command else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


async def watch(command: list[str], stop: asyncio.Event) -> None:
    """Run the command every few seconds, and set `stop` once it exits with 0."""
    is_known = True
    while not stop.is_set():
        try:
            status = await _ask(command)
            is_known = True
        except OSError as error:
            status = None
            if is_known:
                log.error("no notice can come: the command does not run", command=command[0], error=str(error))
            is_known = False
        if status == 0:
            log.warning("this machine is about to be taken away; the worker stops", command=command[0])
            stop.set()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                await stop.wait()


async def _ask(command: list[str]) -> int | None:
    """Return the command's exit status; None if it takes too long."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(ANSWER_S):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
