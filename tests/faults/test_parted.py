"""A machine that is cut off at the network for longer than a lease, and comes back."""

from collections.abc import Awaitable, Collection
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus
from service.queue.progress import Heartbeat
from tests.faults.machines import Machine
from tests.faults.wire import reached
from tests.fleet.deployment import Deployment, until, variables

LEASE_S = 3.0
REQUESTS = 96
MODEL = "m"


async def held(database: Database, owner: str | None = None) -> dict[int, str]:
    """The owners of leased slices, by slice."""
    async with database.read() as session:
        found = await session.execute(select(Slice.id, Slice.owner).where(Slice.status == SliceStatus.LEASED))
        return {slice_id: name for slice_id, name in found.tuples() if name and owner in (None, name)}


async def first_epochs(deployment: Deployment, slices: Collection[int]) -> set[str]:
    """What has been written for these slices under their first leases."""
    return {
        key
        for key in await deployment.storage.keys("shards")
        if int(key.split("/")[1]) in slices and key.rsplit("/", 1)[1].startswith(f"{1:08d}-")
    }


async def alive(deployment: Deployment) -> set[str]:
    return {each["name"] for each in await Heartbeat(deployment.redis).alive()}


@pytest.mark.timeout(1800)
@pytest.mark.slow
async def test_a_machine_that_was_cut_off_writes_nothing_that_counts(
    tmp_path: Path, postgres_url: str, two_machines: list[Machine]
) -> None:
    """It is cut off from SQL and Redis. Its answers still reach the storage, as they may where only a part is cut."""
    async with AsyncExitStack() as stack:
        stack.enter_context(variables(tmp_path, LEASE_S))
        deployment = await stack.enter_async_context(
            Deployment.open(tmp_path, database_url=postgres_url, model_name=MODEL)
        )
        for name, machine in zip("ab", two_machines, strict=True):
            told = {
                "BATCHWEAVE_DATA_DIR": str(tmp_path),
                "BATCHWEAVE_MODEL": deployment.source,
                "BATCHWEAVE_MODEL_NAME": MODEL,
                "BATCHWEAVE_WORKER_NAME": name,
                "BATCHWEAVE_LEASE_S": str(LEASE_S),
                "BATCHWEAVE_DATABASE_TIMEOUT_S": "5",
                "TEST_SLOWNESS": "6" if name == "a" else "1",
                **reached(machine.here, stack, postgres_url, deployment.settings.redis.removeprefix("unix://")),
            }
            stack.enter_context(machine.process("tests.fleet.worker", tmp_path / f"log-{name}", **told))
        await until("both live", lambda: _is(alive(deployment), {"a", "b"}))

        batch_id = await deployment.submit(MODEL, REQUESTS, 1.5)
        await until("both work", lambda: _has(held(deployment.database), {"a", "b"}))
        mine = await held(deployment.database, "a")
        await until("a has answered some of its requests", lambda: first_epochs(deployment, mine))
        two_machines[0].cut()
        await until("b has all", lambda: _has(held(deployment.database), {"b"}))
        before = await first_epochs(deployment, mine)
        await until("the batch is answered", lambda: deployment.has_ended(batch_id))
        assert await deployment.answers(batch_id) == [str(each) for each in range(REQUESTS)]
        await until("a is silent", lambda: _is(alive(deployment), {"b"}))
        await until("a has written what nobody reads", lambda: _grown(first_epochs(deployment, mine), before))

        two_machines[0].mend()
        await until("a is back", lambda: _is(alive(deployment), {"a", "b"}))
        deployment.hold()  # after many failures a looks every 10 s only, and b would answer all
        again = await deployment.submit(MODEL, REQUESTS, 0.1)
        await until("a works again", lambda: held(deployment.database, "a"))
        deployment.release()
        await until("the second batch is answered", lambda: deployment.has_ended(again))
        for each in (batch_id, again):
            assert await deployment.answers(each) == [str(number) for number in range(REQUESTS)]


async def _is(found: Awaitable[set[str]], wanted: set[str]) -> bool:
    return await found == wanted


async def _has(found: Awaitable[dict[int, str]], owners: set[str]) -> bool:
    return set((await found).values()) == owners


async def _grown(found: Awaitable[set[str]], before: set[str]) -> bool:
    return bool(await found - before)
