"""The command line. A command's module is imported only when it is called: some of them need seconds for that."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

# By name: where it is, and its help, which its own begins with.
COMMANDS = {
    "up": ("service.cli.roles:up", "Run the whole service in the foreground: Redis, API, planner, worker."),
    "submit": ("service.remote.submit:submit", "Upload a file and run it as a batch. Prints the batch's id."),
    "batches": ("service.remote.batches:app", "Look at batches, wait for them, end them, fetch what they gave."),
    "files": ("service.remote.files:app", "What was uploaded, and what batches gave."),
    "workers": ("service.remote.workers:app", "See who runs the slices; let one end its work and take no more."),
    "doctor": ("service.cli.doctor:doctor", "Check what the service needs on this machine, and say what to do."),
    "keys": ("service.cli.tenants:keys", "Make, list and revoke API keys."),
    "projects": ("service.cli.tenants:projects", "Make, list and limit projects, which own files and batches."),
    "audit": ("service.cli.tenants:show_audit", "Who changed what, the newest last."),
    "api": ("service.cli.roles:api", "Run the HTTP API alone."),
    "planner": ("service.cli.roles:planner", "Run the jobs of the control plane alone."),
    "worker": ("service.cli.roles:worker", "Run one engine and the slices that it leases."),
    "calibrate": ("service.cli.calibrate:calibrate", "Measure what steps cost on this machine with this model."),
    "plan": ("service.cli.workloads:plan", "Plan a file without running it."),
    "simulate": ("service.cli.workloads:simulate", "Run a workload through a simulated engine."),
    "demo": ("service.cli.demo:demo", "Start the service, run a real batch through the official openai client."),
    "openapi": ("service.cli.demo:openapi", "Print the OpenAPI description of the HTTP API as YAML."),
}
COMPLETED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # where a shell that asks how a line goes on gives it to us


def command_line(called: str) -> typer.Typer:
    """All commands by name and help, the called one with all it has."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help="Offline batch inference on SGLang behind an OpenAI-style Batch API.",
    )
    for name, (place, text) in COMMANDS.items():
        if name == called:
            module, _, attribute = place.partition(":")
            _add(app, name, getattr(import_module(module), attribute))
        else:
            app.command(name, help=text)(_nothing)
    return app


def main() -> None:
    line = next((os.environ[name].split() for name in COMPLETED if name in os.environ), sys.argv)
    command_line(next((each for each in line[1:] if not each.startswith("-")), ""))()


def _add(app: typer.Typer, name: str, command: typer.Typer | Callable[..., Any]) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _nothing() -> None:
    """Stands for a command that was not called."""
