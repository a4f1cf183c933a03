"""What the tests of the dashboard over HTTP do as a browser would."""

import httpx

from service.db.sessions import Database
from service.db.tables import DEFAULT_PROJECT
from service.db.tenant_tables import Project, Role
from service.tenants.keys import new_key
from tests.integration.harness import Harness

OWN_PAGE = {"Sec-Fetch-Site": "same-origin"}  # what a browser says of a form on a page of the service itself
PAGES = ("", "/batches", "/new", "/files", "/online", "/workers", "/projects", "/audit", "/settings")


async def make_key(database: Database, role: Role) -> tuple[str, str]:
    text, row = new_key(DEFAULT_PROJECT, "ana", role, 0, None)
    async with database.write() as session:
        session.add(row)
    return text, row.id


async def sign_in(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/sign-in", data={"key": key, "back": "/dashboard/batches"})


async def key_of_another_project(harness: Harness, role: Role) -> str:
    async with harness.database.write() as session:
        session.add(Project(id="proj_x", name="other", created_at=0))
        await session.flush()
        text, row = new_key("proj_x", "eve", role, 0, None)
        session.add(row)
    return text
