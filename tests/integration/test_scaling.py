"""What the chart has KEDA ask PostgreSQL is the work that is left."""

import pytest
from sqlalchemy import text

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from tests.deploy.test_helm import EVERYTHING, one, render


async def test_the_scaler_counts_the_seconds_of_work_that_are_left(database: Database) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("KEDA asks PostgreSQL")
    trigger = one(render(EVERYTHING), "ScaledObject", "bw-large")["spec"]["triggers"][0]
    common = {"endpoint": "/v1/completions", "input_file_id": "f", "completion_window": "24h", "created_at": 0}
    shared = {**common, "expires_at": 9, "model": "it's large", "total": 100, "planned": 50}
    work = {"planned_compute_s": 10.0, "planned_memory_s": 30.0}
    async with database.write() as session:
        session.add(Batch(id="a", status=BatchStatus.IN_PROGRESS, completed=20, **shared, **work))
        session.add(Batch(id="b", status=BatchStatus.COMPLETED, completed=100, **shared, **work))
        session.add(Batch(id="c", status=BatchStatus.IN_PROGRESS, held=True, **shared, **work))
        session.add(Batch(id="d", status=BatchStatus.CANCELLING, **shared, **work))
        session.add(Batch(id="e", status=BatchStatus.IN_PROGRESS, **{**shared, "total": 50_000, "planned": 0}))
    async with database.read() as session:
        assert await session.scalar(text(trigger["metadata"]["query"])) == 30.0 * 80 / 50 + 1
