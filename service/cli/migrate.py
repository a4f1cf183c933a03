"""`batchweave migrate`: the database's schema, forward and back."""

from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from batchweave.terminal import DataDirOption, fail, said
from service.cli.start import open_database, settings_of
from service.db.migrate import downgrade, newest, released
from service.errors import StartError
from service.up.folder_lock import is_locked


def migrate(
    to: Annotated[
        str | None,
        typer.Option("--to", help="Revision of an older version's schema, such as 0029: CHANGELOG.md names it."),
    ] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Bring the database to this version's schema, or back to that of an older one.

    Each role that starts brings it forward by itself. Back: stop all roles, run this with the newer version, then start
    the older one. What only the newer one knows is lost, such as fields that it added; batches, files and answers stay.
    Examples:

    - `batchweave migrate --data-dir ./data`
    - `batchweave migrate --to 0029 --data-dir ./data`
    """
    settings = settings_of(data_dir=data_dir)
    if to is not None and to not in released():
        fail(f"--to {to}: no released version has this schema. Released: {', '.join(released())}.")
    url = make_url(settings.database)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        fail(f"there is no database at {url.database}: give the --data-dir of the service.")
    if settings.data_dir.is_dir() and is_locked(settings.data_dir):
        fail(f"a service runs on {settings.data_dir}: stop it first.")
    open_database(settings)  # an older schema comes forward first, so that each migration back finds what it expects
    if to is not None:
        try:
            downgrade(settings.database, to)
        except (StartError, SQLAlchemyError, OSError) as error:
            fail(f"the schema did not go back to {to}: {error}")
    said.print(f"The database has schema {to or newest()}.")
