"""A machine that is cut off at the network for longer than a lease, and comes back."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select

from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus
from service.queue.progress import Heartbeat
from tests.conftest import new_postgres_database
from tests.faults.machines import Machine, machines, may_be_made
from tests.faults.wire import Wire, socket_of
from tests.fleet.town import Town, until, variables

LEASE_S = 3.0
REQUESTS = 96
MODEL = "m"


@pytest.fixture
def postgres_url(postgres: Any, newest_postgres: str) -> str:
    return new_postgres_database(postgres, newest_postgres)


def reached(machine: Machine, stack: AsyncExitStack, database_url: str, redis_url: str) -> dict[str, str]:
    """The addresses of SQL and Redis as the machine reaches them."""
    wires = [Wire(each, machine.here) for each in (socket_of(database_url), redis_url.removeprefix("unix://"))]
    for wire in wires:
        stack.callback(wire.close)
    url = make_url(database_url).set(drivername="postgresql", host=machine.here, port=wires[0].port, query={})
    return {
        "BATCHWEAVE_DATABASE_URL": url.render_as_string(hide_password=False),
        "BATCHWEAVE_REDIS_URL": f"redis://{machine.here}:{wires[1].port}",
    }


async def owners(database: Database) -> set[str]:
    """The workers that hold slices."""
    async with database.read() as session:
        found = await session.scalars(select(Slice.owner).where(Slice.status == SliceStatus.LEASED))
        return {each or "" for each in found}


async def segments(town: Town) -> dict[str, set[int]]:
    """The epochs of what has been written for each slice."""
    found: dict[str, set[int]] = {}
    for key in await town.storage.keys("shards"):
        folder, _, name = key.rpartition("/")
        found.setdefault(folder, set()).add(int(name.split("-")[0]))
    return found


async def alive(town: Town) -> set[str]:
    return {each["name"] for each in await Heartbeat(town.redis).alive()}


@pytest.mark.skipif(not may_be_made(), reason="this process may not make network namespaces")
async def test_a_machine_that_was_cut_off_writes_nothing_that_counts(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        stack.enter_context(variables(tmp_path, LEASE_S))
        town = await stack.enter_async_context(Town.open(tmp_path, database_url=postgres_url, model_name=MODEL))
        two = stack.enter_context(machines(2))
        for name, machine in zip("ab", two, strict=True):
            told = {
                "BATCHWEAVE_DATA_DIR": str(tmp_path),
                "BATCHWEAVE_MODEL": town.source,
                "BATCHWEAVE_MODEL_NAME": MODEL,
                "BATCHWEAVE_WORKER_NAME": name,
                "BATCHWEAVE_LEASE_S": str(LEASE_S),
                "BATCHWEAVE_DATABASE_TIMEOUT_S": "5",
                "TEST_SLOWNESS": "6" if name == "a" else "1",
                **reached(machine, stack, postgres_url, town.settings.redis),
            }
            stack.enter_context(machine.process("tests.fleet.worker", tmp_path / f"log-{name}", **told))
        await until("both live", lambda: _is(alive(town), {"a", "b"}))

        batch_id = await town.submit(MODEL, REQUESTS, 1.5)
        await until("both work", lambda: _is(owners(town.database), {"a", "b"}))
        await asyncio.sleep(0.5)
        two[0].cut()
        await until("b has all", lambda: _is(owners(town.database), {"b"}))
        await until("the batch is answered", lambda: town.has_ended(batch_id))
        assert await town.answers(batch_id) == [str(each) for each in range(REQUESTS)]
        assert await alive(town) == {"b"}
        # It wrote answers of a slice that another had by then; the finalizer takes one answer for each request.
        assert {1, 2} in (await segments(town)).values()

        two[0].mend()
        await until("a is back", lambda: _is(alive(town), {"a", "b"}))
        again = await town.submit(MODEL, REQUESTS, 0.2)
        await until("a works again", lambda: _has(owners(town.database), "a"))
        await until("the second batch is answered", lambda: town.has_ended(again))
        for each in (batch_id, again):
            assert await town.answers(each) == [str(number) for number in range(REQUESTS)]


async def _is(found: Any, wanted: set[str]) -> bool:
    return await found == wanted


async def _has(found: Any, wanted: str) -> bool:
    return wanted in await found
