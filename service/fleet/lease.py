"""Lets one fleet at a time start and end engines for a database."""

import secrets
import time

from sqlalchemy import or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from service.db.clock import now_s
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import FleetOwner

LEASE_S = 30.0


class LeaseLost(OSError):
    """Another fleet may have the lease by now, so this one must not change anything."""


class FleetLease:
    """Holds the lease that the fleet `owner` needs to change anything. It expires by the database's clock.

    Its row must be there: `namespace_of` makes it.
    """

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        self._until = 0.0

    def check(self) -> None:
        """Raise LeaseLost if another fleet may have the lease, as after a long sleep of this process."""
        if time.monotonic() >= self._until:
            raise LeaseLost("the lease of this fleet has run out")

    async def renew(self) -> bool:
        """Take the lease if it is free, or extend it; return whether this fleet holds it."""
        asked = time.monotonic()
        free = or_(FleetOwner.owner == self._owner, FleetOwner.until < now_s())
        new = {"owner": self._owner, "until": now_s() + LEASE_S}
        async with self._database.write() as session:
            is_mine = rows_changed(await session.execute(update(FleetOwner).where(free).values(new))) == 1
        self._until = asked + LEASE_S if is_mine else 0.0
        return is_mine

    async def let_go(self) -> None:
        """Free the lease for the next fleet."""
        self._until = 0.0
        async with self._database.write() as session:
            await session.execute(update(FleetOwner).where(FleetOwner.owner == self._owner).values(until=0.0))


async def namespace_of(database: Database) -> str:
    """Return what tells this service's engines from those of others on one cluster; chosen once for each database."""
    async with database.write() as session:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        row = {"id": 1, "namespace": f"batchweave-{secrets.token_hex(8)}", "owner": "", "until": 0.0}
        await session.execute(insert(FleetOwner).values(row).on_conflict_do_nothing())
        return (await session.scalars(select(FleetOwner.namespace))).one()
