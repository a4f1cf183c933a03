"""A machine that is cut off at the network for longer than a lease, and comes back."""

import subprocess
from collections.abc import Awaitable, Collection, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select

from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus
from service.queue.progress import Heartbeat
from tests.conftest import new_postgres_database
from tests.faults.machines import Machine, machines
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


async def held(database: Database, owner: str | None = None) -> dict[int, str]:
    """The owners of leased slices, by slice."""
    async with database.read() as session:
        found = await session.execute(select(Slice.id, Slice.owner).where(Slice.status == SliceStatus.LEASED))
        return {slice_id: name for slice_id, name in found.tuples() if name and owner in (None, name)}


async def first_epochs(town: Town, slices: Collection[int]) -> set[str]:
    """What has been written for these slices under their first leases."""
    return {
        key
        for key in await town.storage.keys("shards")
        if int(key.split("/")[1]) in slices and key.rsplit("/", 1)[1].startswith(f"{1:08d}-")
    }


async def alive(town: Town) -> set[str]:
    return {each["name"] for each in await Heartbeat(town.redis).alive()}


@pytest.fixture
def two() -> Generator[list[Machine]]:
    """Two machines; only root may make them."""
    try:
        with machines(2) as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not make network namespaces: {error}")


async def test_a_machine_that_was_cut_off_writes_nothing_that_counts(
    tmp_path: Path, postgres_url: str, two: list[Machine]
) -> None:
    """It is cut off from SQL and Redis. Its answers still reach the storage, as they may where only a part is cut."""
    async with AsyncExitStack() as stack:
        stack.enter_context(variables(tmp_path, LEASE_S))
        town = await stack.enter_async_context(Town.open(tmp_path, database_url=postgres_url, model_name=MODEL))
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
        await until("both work", lambda: _has(held(town.database), {"a", "b"}))
        mine = await held(town.database, "a")
        await until("a has answered some of its requests", lambda: first_epochs(town, mine))
        two[0].cut()
        await until("b has all", lambda: _has(held(town.database), {"b"}))
        before = await first_epochs(town, mine)
        await until("the batch is answered", lambda: town.has_ended(batch_id))
        assert await town.answers(batch_id) == [str(each) for each in range(REQUESTS)]
        await until("a is silent", lambda: _is(alive(town), {"b"}))
        await until("a has written what nobody reads", lambda: _grown(first_epochs(town, mine), before))

        two[0].mend()
        await until("a is back", lambda: _is(alive(town), {"a", "b"}))
        again = await town.submit(MODEL, REQUESTS, 0.2)
        await until("a works again", lambda: held(town.database, "a"))
        await until("the second batch is answered", lambda: town.has_ended(again))
        for each in (batch_id, again):
            assert await town.answers(each) == [str(number) for number in range(REQUESTS)]


async def _is(found: Awaitable[set[str]], wanted: set[str]) -> bool:
    return await found == wanted


async def _has(found: Awaitable[dict[int, str]], owners: set[str]) -> bool:
    return set((await found).values()) == owners


async def _grown(found: Awaitable[set[str]], before: set[str]) -> bool:
    return bool(await found - before)
