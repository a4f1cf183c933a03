"""`batchweave run`: runs a file on this machine's GPUs with one command, and continues where it was interrupted."""

import gzip
import json
import logging
import sys
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from batchweave.errors import CommandError
from batchweave.files import EXAMPLE, opened
from batchweave.remote.accept import AcceptOption, accept_of
from batchweave.remote.client import Away
from batchweave.remote.download import can_be_written
from batchweave.remote.run import Run, check_places, check_served
from batchweave.remote.session import NO_KEY, Exit, KeyOption, service_at
from batchweave.terminal import DataDirOption, fail, interrupted, said
from service.cli.start import EngineOption, EnginesOption, GpusOption, ModelOption, ScriptOption, log_to, settings_of
from service.endpoints import ENDPOINTS
from service.errors import CostsError, StartError
from service.settings import DEMO_MODEL, DEMO_NAME, Settings

if TYPE_CHECKING:
    from service.up.child import Service

FIRST_LINE_BYTES = 16 * 1024 * 1024


def run(
    file: Annotated[Path | None, typer.Argument(help="JSONL file with one request per line.")] = None,
    model: ModelOption = None,
    input_file: Annotated[
        Path | None, typer.Option("--input-file", "-i", help="The file, as `vllm run-batch` names it.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--output-file",
            "-o",
            callback=can_be_written,
            help="Where results go, errors beside it; default: FILE.results.jsonl.",
        ),
    ] = None,
    accept: AcceptOption = None,
    again: Annotated[bool, typer.Option("--again", help="Start from nothing, also if it was run before.")] = False,
    data_dir: DataDirOption = None,
    gpus: GpusOption = None,
    engines: EnginesOption = None,
    engine: EngineOption = None,
    script: ScriptOption = None,
    key: KeyOption = NO_KEY,
) -> None:
    """Run a file of requests on this machine: starts what it needs, writes the results, and ends.

    Run the same command again after Ctrl-C, a crash or a power loss: it continues, and computes no answer twice. A
    changed file, model, script or --accept starts from nothing. Where `batchweave up` runs on the same data folder,
    that service runs the file. The model is served under the name that the file's first line asks for; without --model
    it is that model. Exit codes: 0 done, 3 some requests failed, 4 the batch failed, 1 anything else, 130 after Ctrl-C.
    Examples:

    - `batchweave run requests.jsonl`
    - `batchweave run requests.jsonl --model Qwen/Qwen2.5-7B-Instruct --output results.jsonl`
    - `batchweave run requests.jsonl --accept schema,finish,retries=1`
    - `batchweave run -i requests.jsonl -o results.jsonl --model ./my-model --gpus 0,1`
    """  # fmt: skip
    path = input_file or file
    if path is None or (file is not None and input_file is not None):
        fail("name one file: batchweave run FILE, or -i FILE.")
    assert path is not None
    log_to(sys.stderr, logging.WARNING)
    with failing_clearly("Stopped. Run the same command again to continue."):
        endpoint, named = first_request(path)
        is_named = model is not None
        model = model or (DEMO_MODEL if named == DEMO_NAME else named)
        settings = settings_of(model=model, model_name=named, data_dir=data_dir, engine=engine, script=script)
        given = {"--gpus": gpus, "--engines": engines, "--engine": engine, "--script": script}
        options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        target = output or can_be_written(
            path.with_name(f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}.results.jsonl")
        )
        assert target is not None
        try:
            code = run_file(path, target, endpoint, settings, options, key, again, accept=accept_of(accept))
        except CommandError as error:
            if is_named or f"--model {named}:" not in str(error):
                raise
            mine = (
                f"The file's first line names this model. With --model, a folder or another model answers as {named!r}"
            )
            raise CommandError(f"{str(error).rstrip('.')}. {mine}; the demo's small one is --model demo.") from error
    raise typer.Exit(code)


@contextmanager
def failing_clearly(stopped: str) -> Generator[None, None, None]:
    """End the command with one line and its exit code at what users cause; at Ctrl-C the line is `stopped`."""
    try:
        yield
    except KeyboardInterrupt:
        interrupted(stopped)
    except (CommandError, StartError, CostsError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def run_file(
    path: Path,
    output: Path,
    endpoint: str,
    settings: Settings,
    options: Sequence[str] = (),
    key: str = NO_KEY,
    again: bool = False,
    around: Callable[["Service"], AbstractContextManager[object]] = nullcontext,
    accept: dict[str, Any] | None = None,
) -> Exit:
    """Run a file on the service of the data folder; if that one was joined and ends, on the next one.

    `options`: more of those of `up`, for a service that this starts. `around`: a block around the run, once there is a
    service. Raises CommandError.
    """
    from service.up.child import ServiceGone, service_on

    check_places(path, output)
    rules = settings.script.read_text() if settings.script is not None else ""
    answers = f"{settings.model_source} {settings.engine} {rules}"
    memory = settings.data_dir / "runs"
    options = ["--model", settings.model, "--model-name", settings.served_model, *options]
    while True:
        with service_on(settings, options, is_open=key == NO_KEY) as service, service_at(service.url, key) as client:
            try:
                if service.process is None:
                    check_served(client, settings.served_model)
                with around(service):
                    return Run(client, path, output, memory, endpoint, answers, accept).run(service.check, again)
            except (ServiceGone, Away, httpx.TransportError) as error:
                if not isinstance(error, ServiceGone):
                    with suppress(ServiceGone):
                        service.check()
                        raise
                said.print("the service that was joined has ended; continues with one of its own")
                again = False


def first_request(path: Path) -> tuple[str, str]:
    """Return the endpoint and the model of a file's first request. Raises CommandError."""
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is not a regular file; it is read more than once.")
    try:
        with opened(path) as lines:
            line = next((each for each in iter(lambda: lines.readline(FIRST_LINE_BYTES), b"") if each.strip()), b"")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CommandError(f"{path}: the gzip file is damaged: {error}") from error
    if not line:
        raise CommandError(f"{path} is empty: it needs one request per line.")
    if len(line) == FIRST_LINE_BYTES and not line.endswith(b"\n"):
        raise CommandError(f"{path}: its first line is longer than {FIRST_LINE_BYTES >> 20} MiB.")
    try:
        request = json.loads(line.decode("utf-8-sig"))
        endpoint, model = str(request["url"]), str(request["body"]["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f'{path}: its first line is not a request with a "url" and a "model" in its "body". One looks so: {EXAMPLE}'
        ) from error
    if endpoint not in ENDPOINTS:
        raise CommandError(
            f"{path}: the url of its first line must be one of {', '.join(ENDPOINTS)}, not {endpoint!r}."
        )
    return endpoint, model
