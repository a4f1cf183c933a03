"""Connects remote commands to the service, and ends a failing one with a line that says what to do next."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated

import httpx
import typer

from batchweave.errors import CommandError
from batchweave.remote.client import AnswerError, Away, Client, NotAService
from batchweave.terminal import fail

UrlOption = Annotated[str, typer.Option("--url", envvar="BATCHWEAVE_URL", help="URL of the service.")]
KeyOption = Annotated[
    str, typer.Option("--api-key", envvar="BATCHWEAVE_API_KEY", help="Key printed by `batchweave keys create`.")
]
LOCAL_URL = "http://127.0.0.1:8080"
NO_KEY = "none"  # sent to a service that requires no keys


class Exit(IntEnum):
    """Exit codes of all remote commands; docs/cli.md lists them too."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    SOME_FAILED = 3  # the batch has completed, but some of its requests failed
    NOT_COMPLETED = 4  # the batch failed, expired or was cancelled
    INTERRUPTED = 130
    PIPE = 141


def named(value: str) -> str:
    """Return an id that is safe in a URL path. Raises typer.BadParameter."""
    if not value or not value.replace("-", "").replace("_", "").isalnum():
        raise typer.BadParameter(f"{value!r} is not an id")
    return value


def connect(url: str, key: str) -> Client:
    """Return a client of the service. Raises CommandError for an invalid URL or key."""
    base = url.rstrip("/")
    try:
        is_url = httpx.URL(base).scheme in ("http", "https") and bool(httpx.URL(base).host)
    except httpx.InvalidURL:
        is_url = False
    if not is_url:
        raise CommandError(f"{url!r} is not the URL of a service; write it as http://host:8080.")
    if not key.isascii() or not key.isprintable() or not key:
        raise CommandError("The API key is malformed: copy it exactly as `batchweave keys create` printed it.")
    return Client(base if base.endswith("/v1") else f"{base}/v1", key)


@contextmanager
def service_at(url: str, key: str) -> Generator[Client, None, None]:
    """Yield a client of the service; an error in the block ends the command with one line."""
    try:
        with connect(url, key) as client:
            yield client
    except CommandError as error:
        fail(str(error))
    except AnswerError as error:
        message = error.message or f"{error}: is this a batchweave service?"
        for kind, command in (("Batch", "batches"), ("File", "files")):
            if message.startswith(f"No such {kind} object"):
                message = f"{message.rstrip('.')}. `batchweave {command} list` lists yours."
        key_help = " Pass a key with BATCHWEAVE_API_KEY or --api-key; `batchweave keys create` creates one."
        fail(message + (key_help if error.status == 401 else ""))
    except Away:
        fail(f"{url} is not responding. Is the service running? Set another URL with BATCHWEAVE_URL or --url.")
    except httpx.TransportError as error:
        fail(f"The connection to {url} was lost before the response was complete ({error!r}). Run the command again.")
    except NotAService as error:
        fail(f"{url} responds, but not like a batchweave service ({error}). Check the URL.")
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(Exit.PIPE) from None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
