"""`batchweave demo` and `batchweave openapi`: show the service, and describe its API."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.cli.start import ModelOption, PortOption, log_to, settings_of
from service.settings import load_settings
from service.terminal import fail


def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="Your own JSONL file instead of the built-in ones.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the service running until Ctrl-C.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Stream answers too, and compare them alone and beside the batches.")
    ] = False,
    model: ModelOption = None,
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Folder for the service's data.")] = Path(".demo"),
    port: PortOption = None,
) -> None:
    """Start the service, run a real batch through the official openai client, show the results, and stop.

    Examples:

    - `batchweave demo`
    - `batchweave demo --file requests.jsonl --keep`
    - `batchweave demo --online`
    """
    from service.demo.run import run_demo
    from service.errors import DemoError

    settings = settings_of(model=model, data_dir=data_dir, port=port)
    log_to(sys.stderr, logging.WARNING)
    try:
        run_demo(settings, file, keep, online)
    except DemoError as error:
        fail(str(error))


def openapi() -> None:
    """Print the OpenAPI description of the HTTP API as YAML."""
    import yaml

    from service.app import create_app

    print(yaml.safe_dump(create_app(load_settings()).openapi(), sort_keys=False, allow_unicode=True, width=110), end="")
