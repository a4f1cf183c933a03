"""Signing secrets, sealed in the database: a copy of it does not let its reader sign in our name."""

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
    """Nothing is there to seal secrets with, or they were sealed with another key; the message says what to do."""


def sealing_key(settings: Settings) -> str | None:
    """BATCHWEAVE_SECRET_KEY, or where the database is this machine's own a key in the data directory, made once.

    None where several machines would each make one of their own.
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
    """Read the key, and make it where no other process has."""
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
        """Raises NoKey."""
        if self._fernet is None:
            raise NoKey("webhooks need BATCHWEAVE_SECRET_KEY, the same in every process of the service")
        return SEALED + self._fernet.encrypt(secret.encode()).decode()

    def open(self, stored: str) -> str:
        """Also of one that was stored before secrets were sealed. Raises NoKey."""
        if not stored.startswith(SEALED):
            return stored
        if self._fernet is None:
            raise NoKey("BATCHWEAVE_SECRET_KEY is not set, with which webhook secrets are sealed")
        try:
            return self._fernet.decrypt(stored.removeprefix(SEALED)).decode()
        except InvalidToken as error:
            raise NoKey("BATCHWEAVE_SECRET_KEY is not the one with which this secret was sealed") from error
