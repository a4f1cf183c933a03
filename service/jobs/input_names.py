"""Finds the custom_ids of a batch's requests in its input file, by no index: an index may be gone when a batch ends."""

from collections.abc import AsyncIterator

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import select

from batchweave.files import BYTE_ORDER_MARK
from service.db.sessions import Database
from service.db.tables import Batch
from service.jobs.bad_answers import bad_answers
from service.objects.shards import Outcome, RetryOutcome
from service.objects.storage import Storage, file_key
from service.requests.custom_ids import Names
from service.requests.lines import custom_id_of

MOST_LINE_BYTES = 1 << 31  # of files that were validated, and of error files
log = structlog.get_logger()


async def retried(database: Database, storage: Storage, batch: Batch) -> Names | None:
    """Return the custom_ids that a retry repeats; None for other batches. Raises FileNotFoundError.

    They are those of the original's error file, and of its answers that have one of the outcomes.
    """
    if batch.retry_of is None:
        return None
    wanted = set(batch.retry_outcomes or [RetryOutcome.FAILED])
    found = Names(np.empty(0, np.uint64))
    async with database.read() as session:
        files = select(Batch.output_file_id, Batch.error_file_id).where(Batch.id == batch.retry_of)
        output_file, error_file = (await session.execute(files)).one_or_none() or (None, None)
    if RetryOutcome.FAILED in wanted:
        lines = storage.lines(file_key(error_file or ""), MOST_LINE_BYTES)
        found = await Names.of(name async for _, line in lines if (name := _name_of(line)) is not None)
    if bad := [Outcome(each) for each in wanted - {RetryOutcome.FAILED}]:
        found |= await bad_answers(storage, batch.retry_of, output_file, bad)
    return found


async def names_of(
    database: Database, storage: Storage, batch: Batch, numbers: NDArray[np.int64]
) -> AsyncIterator[tuple[int, str | None]]:
    """Yield each of these requests, whose numbers grow, with its custom_id; None once a file is missing."""
    left = map(int, numbers)
    number = next(left, None)
    if number is not None:
        try:
            async for at, line in _requests(storage, batch, await retried(database, storage, batch)):
                if at == number:
                    yield number, _name_of(line)
                    if (number := next(left, None)) is None:
                        return
        except FileNotFoundError:
            log.exception("cannot tell the names of requests", batch=batch.id, file=batch.input_file_id)
    while number is not None:
        yield number, None
        number = next(left, None)


async def _requests(storage: Storage, batch: Batch, only: Names | None) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the number and the line of each request of a valid file."""
    number = 0
    async for offset, line in storage.lines(file_key(batch.input_file_id), MOST_LINE_BYTES):
        line = line.removeprefix(BYTE_ORDER_MARK) if offset == 0 else line
        if line.strip() and (only is None or (_name_of(line) or "") in only):
            yield number, line
            number += 1


def _name_of(line: bytes) -> str | None:
    """Return the line's custom_id; None for an unreadable line, which must not keep its batch from finishing."""
    try:
        return custom_id_of(line)
    except (msgspec.DecodeError, RecursionError):
        log.exception("cannot read a line of the input file")
        return None
