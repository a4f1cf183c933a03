"""Every state move of a batch, legal or not, on both databases."""

import pytest
from sqlalchemy import select

from service.db.moves import BATCH_MOVES, LIVE, TERMINAL, move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from tests.conftest import Clock

pytestmark = pytest.mark.dialects


def test_moves_are_those_of_the_contract() -> None:
    assert set(BATCH_MOVES) == set(BatchStatus)
    assert {str(each) for each in TERMINAL} == {"failed", "completed", "expired", "cancelled"}
    assert set(BatchStatus) == LIVE | TERMINAL
    reached, new = set[BatchStatus](), {BatchStatus.VALIDATING}
    while new:
        reached |= new
        new = {after for each in new for after in BATCH_MOVES[each]} - reached
    assert reached == set(BatchStatus)


@pytest.mark.parametrize("start", list(BatchStatus))
async def test_only_legal_moves_are_made(database: Database, clock: Clock, start: BatchStatus) -> None:
    for to in BatchStatus:
        batch_id = f"batch_{start}_{to}"
        async with database.write() as session:
            session.add(
                Batch(
                    id=batch_id,
                    status=start,
                    endpoint="/v1/completions",
                    input_file_id="file-x",
                    completion_window="24h",
                    created_at=0,
                    expires_at=1,
                )
            )
        legal = to in BATCH_MOVES[start]
        async with database.write() as session:
            if to == BatchStatus.VALIDATING:
                assert not legal
                continue
            assert await move_batch(session, batch_id, to, now=clock(), total=7) == legal
        async with database.read() as session:
            after = (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()
        assert (after.status, after.total) == ((to, 7) if legal else (start, 0))
        assert getattr(after, f"{to}_at") == (int(clock()) if legal else None)
