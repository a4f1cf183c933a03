"""`batchweave keys`, `projects` and `audit`: manage access to the API, directly in the database."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from sqlalchemy import make_url, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from batchweave.terminal import DataDirOption, JsonOption, fail, print_json, print_table, said
from service.db.migrate import upgrade
from service.db.private import keep_private
from service.db.sessions import Database
from service.db.tenant_tables import ApiKey, AuditEvent, Project, Role, Tier
from service.errors import SettingsError, StartError, TenantError
from service.settings import load_settings
from service.tenants import changes

Result = TypeVar("Result")
SHOWN = 200
UNLIMITED = -1
ACTOR = "cli"

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
projects = typer.Typer(no_args_is_help=True, help="Create, list and limit projects, which own files and batches.")

ProjectOption = Annotated[str, typer.Option("--project", help="Name of the project.")]
Quota = Annotated[int | None, typer.Option(min=UNLIMITED, max=2**53, help="-1 removes the quota.")]


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Option("--name", help="Whose key it is, or what it is for.")],
    project: ProjectOption = "default",
    role: Annotated[
        Role,
        typer.Option(
            "--role",
            help="user: files, batches; admin: also webhooks; monitor: only metrics; operator: workers, all projects.",
        ),
    ] = Role.USER,
    days: Annotated[
        int | None,
        typer.Option("--days", min=1, max=changes.LONGEST_DAYS, help="Days until the key expires; default: never."),
    ] = None,
    tier: Annotated[
        Tier | None,
        typer.Option("--tier", help="The strongest class of its online requests; default: the project's."),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Create a key and print it. It is shown only this once. Examples:

    - `batchweave keys create --name ana`
    - `batchweave keys create --name ci --project evaluation --role admin --days 90`
    - `batchweave keys create --name crawler --tier flex`
    """

    async def make(session: AsyncSession) -> tuple[str, str]:
        owner = await changes.find_project(session, project)
        return await changes.create_key(session, owner, name, role, days, ACTOR, int(time.time()), tier)

    text, key_id = _run(make, data_dir)
    if as_json:
        print_json({"id": key_id, "key": text, "project": project, "role": role})
        return
    said.print(f"New key of project {project}, shown only once:")
    print(text)


@keys.command("list")
def list_keys(as_json: JsonOption = False, data_dir: DataDirOption = None) -> None:
    """List all keys, without the keys themselves."""

    async def read(session: AsyncSession) -> Any:
        query = select(ApiKey, Project.name).join(Project, Project.id == ApiKey.project_id)
        return (await session.execute(query.order_by(Project.name, ApiKey.created_at))).all()

    rows = [
        (
            key.id,
            key.name,
            project,
            key.role,
            key.tier or "",
            _day(key.created_at),
            _day(key.expires_at),
            _day(key.revoked_at),
        )
        for key, project in _run(read, data_dir)
    ]
    _print(("id", "name", "project", "role", "tier", "created", "expires", "revoked"), rows, as_json)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Id from `batchweave keys list`: key_…")],
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Revoke a key: the API refuses it from now on."""

    async def revoke(session: AsyncSession) -> None:
        await changes.revoke_key(session, key_id, ACTOR, int(time.time()))

    _run(revoke, data_dir)
    if as_json:
        print_json({"id": key_id, "revoked": True})
    else:
        said.print(f"{key_id} is revoked.")


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Name of the new project.")],
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Create a project. Example: `batchweave projects create evaluation`"""

    async def make(session: AsyncSession) -> None:
        await changes.create_project(session, name, ACTOR, int(time.time()))

    _run(make, data_dir)
    if as_json:
        print_json({"project": name})
    else:
        said.print(f"Created project {name}. To create a key for it: batchweave keys create --project {name} --name …")


@projects.command("set")
def set_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    weight: Annotated[
        float | None,
        typer.Option(
            min=changes.LEAST_WEIGHT, max=changes.MOST_WEIGHT, help="Its share of the work, relative to others."
        ),
    ] = None,
    max_enqueued_tokens: Quota = None,
    max_batches: Quota = None,
    max_bytes: Quota = None,
    max_requests_per_minute: Quota = None,
    tier: Annotated[
        Tier | None,
        typer.Option(help="The strongest class that its online requests may have, as service_tier."),
    ] = None,
    remembers_lengths: Annotated[
        bool | None,
        typer.Option(
            "--remember-lengths/--forget-lengths",
            help="Plan batches by the lengths of earlier answers, or forget these (docs/planner.md).",
        ),
    ] = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Change a project's weight, quotas, and what it remembers. Options left out change nothing. Examples:

    - `batchweave projects set evaluation --max-batches 20 --max-enqueued-tokens 50000000 --weight 2`
    - `batchweave projects set evaluation --forget-lengths`
    - `batchweave projects set chat --tier priority`
    """
    given = {
        "weight": weight,
        "max_enqueued_tokens": max_enqueued_tokens,
        "max_batches": max_batches,
        "max_bytes": max_bytes,
        "max_requests_per_minute": max_requests_per_minute,
        "tier": tier,
        "remembers_lengths": remembers_lengths,
    }
    wanted = {key: None if value == UNLIMITED else value for key, value in given.items() if value is not None}
    if not wanted:
        fail("nothing to change; --help lists the options")

    async def change(session: AsyncSession) -> None:
        project = await changes.find_project(session, name)
        await changes.change_project(session, project, wanted, ACTOR, int(time.time()))

    _run(change, data_dir)
    list_projects(as_json, data_dir)


@projects.command("list")
def list_projects(as_json: JsonOption = False, data_dir: DataDirOption = None) -> None:
    """List all projects with their weights and quotas."""

    async def read(session: AsyncSession) -> Any:
        return (await session.scalars(select(Project).order_by(Project.name))).all()

    rows = [
        (
            each.name,
            f"{each.weight:g}",
            *(
                "none" if quota is None else f"{quota:,}"
                for quota in (
                    each.max_enqueued_tokens,
                    each.max_batches,
                    each.max_bytes,
                    each.max_requests_per_minute,
                )
            ),
            each.tier,
            "remembered" if each.remembers_lengths else "forgotten",
        )
        for each in _run(read, data_dir)
    ]
    _print(
        ("project", "weight", "enqueued tokens", "batches", "bytes", "requests a minute", "tier", "lengths"),
        rows,
        as_json,
    )


def show_audit(
    project: Annotated[str | None, typer.Option("--project", help="Show only this project.")] = None,
    count: Annotated[
        int, typer.Option("--count", min=1, max=100_000, help="How many of the newest changes to show.")
    ] = SHOWN,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
) -> None:
    """Show who changed what, newest last. Example: `batchweave audit --project evaluation --count 50`"""

    async def read(session: AsyncSession) -> Any:
        query = select(AuditEvent, Project.name).join(Project, Project.id == AuditEvent.project_id)
        if project is not None:
            query = query.where(Project.id == (await changes.find_project(session, project)).id)
        return (await session.execute(query.order_by(AuditEvent.seq.desc()).limit(count))).all()

    rows = [
        (datetime.fromtimestamp(each.at, UTC).isoformat(), name, each.actor, each.action, each.object_id, each.detail)
        for each, name in reversed(_run(read, data_dir))
    ]
    _print(("time", "project", "by", "what", "object", "detail"), rows, as_json)


def _run(work: Callable[[AsyncSession], Awaitable[Result]], data_dir: Path | None) -> Result:
    """Run `work` in one transaction on the configured database."""

    async def main(url: str) -> Result:
        database = Database(url)
        try:
            async with database.write() as session:
                return await work(session)
        finally:
            await database.close()

    try:
        settings = load_settings(data_dir=data_dir)
        keep_private(settings)
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        place = make_url(settings.database)
        if place.get_backend_name() == "sqlite" and not Path(place.database or "").exists():
            said.print(
                f"A new database is created: {place.database}. For a running service, name its folder by --data-dir."
            )
        upgrade(settings.database)
        return asyncio.run(main(settings.database))
    except TenantError as error:
        fail(f"{error}; see `batchweave projects list` and `batchweave keys list`")
    except (SettingsError, StartError) as error:
        fail(str(error))
    except (SQLAlchemyError, OSError) as error:
        fail(f"cannot use the database that BATCHWEAVE_DATABASE_URL or BATCHWEAVE_DATA_DIR names: {error}")


def _day(at: int | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).date().isoformat()


def _print(columns: tuple[str, ...], rows: list[tuple[str, ...]], as_json: bool) -> None:
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        print_table(columns, rows)
