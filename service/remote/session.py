"""How the remote commands find the service, print, and fail: in one line that says the next step."""

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, NoReturn

import openai
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

UrlOption = Annotated[str, typer.Option("--url", envvar="BATCHWEAVE_URL", help="Where the service is.")]
KeyOption = Annotated[
    str, typer.Option("--api-key", envvar="BATCHWEAVE_API_KEY", help="As `batchweave keys create` printed it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, for programs.")]
LOCAL_URL = "http://127.0.0.1:8080"
NO_KEY = "none"  # what a service that asks for no keys is sent

# People read standard error, programs standard output: ids, tables and JSON.
said = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
shown = Console(highlight=False, markup=False)


class Exit(IntEnum):
    """Exit codes of every remote command; docs/cli.md has them too."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    SOME_FAILED = 3  # the batch has completed, but some of its requests failed
    NOT_COMPLETED = 4  # the batch failed, expired or was cancelled
    INTERRUPTED = 130


class CommandError(Exception):
    """The command cannot do what it was told; the message says why and what to do."""


def connect(url: str, key: str) -> openai.OpenAI:
    base = url.rstrip("/")
    return openai.OpenAI(base_url=base if base.endswith("/v1") else f"{base}/v1", api_key=key, max_retries=2)


@contextmanager
def service_at(url: str, key: str) -> Generator[openai.OpenAI, None, None]:
    """A client; what goes wrong in the block ends the command with one line."""
    try:
        with connect(url, key) as client:
            yield client
    except CommandError as error:
        fail(str(error))
    except openai.AuthenticationError as error:
        fail(f"{_message(error)} BATCHWEAVE_API_KEY or --api-key gives it; `batchweave keys create` makes one.")
    except openai.APIConnectionError:
        fail(f"{url} does not answer. Is the service up there? BATCHWEAVE_URL or --url names another.")
    except openai.APIStatusError as error:
        fail(_message(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def fail(message: str) -> NoReturn:
    said.print(f"error: {message}", style="red")
    raise typer.Exit(Exit.FAILED)


def print_json(value: Any) -> None:
    """Models, and lists of them, as the API sent them."""
    print(json.dumps([_plain(each) for each in value] if isinstance(value, list) else _plain(value), indent=2))


def print_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    shown.print(table, soft_wrap=not shown.is_terminal)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _message(error: openai.APIStatusError) -> str:
    body: Any = error.body
    text = body.get("message") if isinstance(body, dict) else None
    return str(text or f"{error.request.url} answers {error.status_code}: is a batchweave service there?")
