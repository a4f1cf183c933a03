"""Seals signing secrets in the database, so that a copy of the database is not enough to sign in our name."""

import base64
import hashlib
import os
import secrets
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from service.settings import Settings

KEY_FILE = "secret.key"
SEALED = "sealed:"


class NoKey(Exception):
    """There is no key to seal secrets with, or they were sealed with another one; the message says what is wrong."""


def sealing_key(settings: Settings) -> str | None:
    """Return BATCHWEAVE_SECRET_KEY or, with a local database, a key that is created once in the data directory.

    Returns None if several machines share the database, as each would create a key of its own.
    """
    if settings.secret_key:
        return settings.secret_key
    if not settings.database.startswith("sqlite"):
        return None
    path = settings.data_dir / KEY_FILE
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = path.with_name(f"{KEY_FILE}.{os.getpid()}")
    if not path.exists():
        made.touch(mode=0o600)
        made.write_text(secrets.token_urlsafe(32))
        _name_once(made, path)
    return path.read_text()


def _name_once(made: Path, path: Path) -> None:
    """Give the new key file its final name, unless another process has been faster."""
    try:
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink()


class Seal:
    def __init__(self, key: str | None) -> None:
        self._fernet = None
        if key is not None:
            self._fernet = Fernet(base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()))

    def close(self, secret: str) -> str:
        """Seal a secret for storage. Raises NoKey."""
        if self._fernet is None:
            raise NoKey("BATCHWEAVE_SECRET_KEY must be set, to the same value in every process of the service")
        return SEALED + self._fernet.encrypt(secret.encode()).decode()

    def open(self, stored: str) -> str:
        """Return a stored secret; one stored before secrets were sealed is returned as it is. Raises NoKey."""
        if not stored.startswith(SEALED):
            return stored
        if self._fernet is None:
            raise NoKey("BATCHWEAVE_SECRET_KEY is not set, but the webhook's secret is sealed with it")
        try:
            return self._fernet.decrypt(stored.removeprefix(SEALED)).decode()
        except InvalidToken as error:
            raise NoKey("BATCHWEAVE_SECRET_KEY is not the key that sealed the webhook's secret") from error
