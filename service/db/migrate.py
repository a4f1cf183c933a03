"""Migrates the database to the newest schema."""

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory


def config(database_url: str) -> Config:
    found = Config()
    found.set_main_option("script_location", str(files("migrations")))
    found.set_main_option("sqlalchemy.url", database_url.replace("%", "%%"))
    return found


def upgrade(database_url: str) -> None:
    """Run all pending migrations; several processes may do so at once."""
    command.upgrade(config(database_url), "head")


def newest() -> str | None:
    """Return the revision that `upgrade` leads to."""
    return ScriptDirectory.from_config(config("sqlite://")).get_current_head()
