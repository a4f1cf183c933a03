"""Lets one fleet at a time start and end engines for a database."""

import time

from sqlalchemy import or_, update
from sqlalchemy.dialects import postgresql, sqlite

from service.db.clock import now_s
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import FleetTurn

LEASE_S = 30.0


class FleetLease:
    """The lease that the fleet `owner` must hold to change anything. It expires by the database's clock."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner
        self._until = 0.0

    @property
    def held(self) -> bool:
        """Whether no other fleet can have the lease yet; a fleet that slept for long finds it False."""
        return time.monotonic() < self._until

    async def keep(self) -> bool:
        """Take the lease if it is free, or extend it; return whether this fleet holds it."""
        asked = time.monotonic()
        free = or_(FleetTurn.owner == self._owner, FleetTurn.until < now_s())
        new = {"owner": self._owner, "until": now_s() + LEASE_S}
        async with self._database.write() as session:
            insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
            row = insert(FleetTurn).values(id=1, **new)
            row = row.on_conflict_do_update(index_elements=["id"], set_=new, where=free)
            mine = rows_changed(await session.execute(row)) == 1
        self._until = asked + LEASE_S if mine else 0.0
        return mine

    async def let_go(self) -> None:
        """Free the lease for the next fleet."""
        self._until = 0.0
        async with self._database.write() as session:
            await session.execute(update(FleetTurn).where(FleetTurn.owner == self._owner).values(until=0.0))
