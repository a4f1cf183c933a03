"""`batchweave run`: runs a file on this machine's GPUs with one command, and continues where it was interrupted."""

import gzip
import json
import logging
import sys
import zlib
from pathlib import Path
from typing import Annotated

import typer

from service.cli.start import EngineOption, EnginesOption, GpusOption, ModelOption, ScriptOption, log_to, settings_of
from service.errors import CommandError, CostsError, StartError
from service.remote.download import can_be_written
from service.remote.session import NO_KEY, KeyOption, service_at
from service.requests.files import opened
from service.settings import DEMO_MODEL, DEMO_NAME
from service.terminal import DataDirOption, fail, interrupted

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
    again: Annotated[bool, typer.Option("--again", help="Start anew, also if it was run or begun before.")] = False,
    data_dir: DataDirOption = None,
    gpus: GpusOption = None,
    engines: EnginesOption = None,
    engine: EngineOption = None,
    script: ScriptOption = None,
    key: KeyOption = NO_KEY,
) -> None:
    """Run a file of requests on this machine: starts what it needs, writes the results, and ends.

    Run the same command again after Ctrl-C, a crash or a power loss: it continues, and computes no answer twice. A
    changed file starts anew. Where `batchweave up` runs on the same data folder, that service runs the file. The model
    is served under the name that the file's first line asks for; without --model it is that model. Exit codes: 0 done,
    3 some requests failed, 4 the batch failed, 1 anything else, 130 after Ctrl-C. Examples:

    - `batchweave run requests.jsonl`
    - `batchweave run requests.jsonl --model Qwen/Qwen2.5-7B-Instruct --output results.jsonl`
    - `batchweave run -i requests.jsonl -o results.jsonl --model ./my-model --gpus 0,1`
    """  # fmt: skip
    from service.remote.run import Run
    from service.up.child import service_on

    path = input_file or file
    if path is None or (file is not None and input_file is not None):
        fail("name one file: batchweave run FILE, or -i FILE.")
    assert path is not None
    log_to(sys.stderr, logging.WARNING)
    try:
        endpoint, named = _first(path)
        model = model or (DEMO_MODEL if named == DEMO_NAME else named)
        settings = settings_of(model=model, model_name=named, data_dir=data_dir, engine=engine, script=script)
        options = ["--model", settings.model, "--model-name", named]
        given = {"--gpus": gpus, "--engines": engines, "--engine": engine, "--script": script}
        options += [word for name, value in given.items() if value is not None for word in (name, str(value))]
        target = output or path.with_name(f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}.results.jsonl")
        with service_on(settings, options) as service, service_at(service.url, key) as client:
            found = Run(client, path, target, settings.data_dir / "runs", endpoint)
            code = found.run(service.check, again)
    except KeyboardInterrupt:
        interrupted("Stopped. Run the same command again to continue.")
    except (CommandError, StartError, CostsError) as error:
        fail(str(error))
    raise typer.Exit(code)


def _first(path: Path) -> tuple[str, str]:
    """Return the endpoint and the model of a file's first request. Raises CommandError."""
    try:
        with opened(path) as lines:
            line = next((each for each in iter(lambda: lines.readline(FIRST_LINE_BYTES), b"") if each.strip()), b"")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CommandError(f"{path}: the gzip file is damaged: {error}") from error
    if not line:
        raise CommandError(f"{path} is empty: it needs one request per line.")
    try:
        request = json.loads(line.decode("utf-8-sig"))
        return str(request["url"]), str(request["body"]["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f'{path}: its first line is not a request with a "url" and a "model" in its "body"; see docs/api.md.'
        ) from error
