"""Migrates the database to the newest schema, or back to an older one."""

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util.exc import CommandError as AlembicError

from service.errors import StartError

OLDEST = "0029"  # the schema of 0.1.0


def config(database_url: str) -> Config:
    found = Config()
    found.set_main_option("script_location", str(files("migrations")))
    found.set_main_option("sqlalchemy.url", database_url.replace("%", "%%"))
    return found


def upgrade(database_url: str) -> None:
    """Run all pending migrations; several processes may do so at once. Raises StartError for a newer schema."""
    try:
        command.upgrade(config(database_url), "head")
    except AlembicError as error:
        cause = error.__cause__
        raise StartError(newer(cause.argument) if isinstance(cause, ResolutionError) else str(error)) from error


def downgrade(database_url: str, revision: str) -> None:
    """Undo the migrations that came after a revision. Raises StartError if the version does not know it."""
    try:
        command.downgrade(config(database_url), revision)
    except AlembicError as error:
        raise StartError(f"The schema cannot go back to {revision}: {error}") from error


def known() -> list[str]:
    """Return the revisions that this version knows, oldest first."""
    return [each.revision for each in ScriptDirectory.from_config(config("sqlite://")).walk_revisions()][::-1]


def released() -> list[str]:
    """Return the revisions to which a database may go back: from that of the oldest version on."""
    return [each for each in known() if each >= OLDEST]


def newer(revision: str) -> str:
    """Return what to do about a database with a schema that this version does not know."""
    return (
        f"The database has schema {revision}, which this version does not know: its newest is {newest()}. Install the "
        f"version that made it, or go back with that one: batchweave migrate --to {newest()} (docs/operate.md)."
    )


def newest() -> str | None:
    """Return the revision that `upgrade` leads to."""
    return ScriptDirectory.from_config(config("sqlite://")).get_current_head()
