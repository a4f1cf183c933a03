"""The command line. A command's module is imported only when the command is called: some imports take seconds.

Those whose modules are in `service` need the distribution batchweave-server; without it they are not listed.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Annotated, Any

import typer

from batchweave.terminal import fail

# By name: where the command is, and its help, with which the command's own help must begin.
COMMANDS = {
    "run": (
        "service.cli.run:run",
        "Run a file of requests on this machine: starts what it needs, writes the results, and ends.",
    ),
    "up": (
        "service.cli.roles:up",
        "Run the whole service in the foreground: Redis, API, planner, and an engine for each GPU.",
    ),
    "submit": ("batchweave.remote.submit:submit", "Upload a file, run it as a batch, and print the batch's id."),
    "batches": (
        "batchweave.remote.batches:app",
        "List, watch, start, cancel and retry batches, and fetch their results.",
    ),
    "files": ("batchweave.remote.files:app", "List, upload, download and delete files: batch inputs and results."),
    "models": ("batchweave.remote.models:models", "List the models that requests can name."),
    "workers": ("batchweave.remote.workers:app", "List workers, drain them and resume them."),
    "migrate": (
        "service.cli.migrate:migrate",
        "Bring the database to this version's schema, or back to that of an older one.",
    ),
    "doctor": ("service.cli.doctor:doctor", "Check that this machine has everything the service needs."),
    "keys": ("service.cli.tenants:keys", "Create, list and revoke API keys."),
    "projects": ("service.cli.tenants:projects", "Create, list and limit projects, which own files and batches."),
    "audit": ("service.cli.tenants:show_audit", "Show who changed what, newest last."),
    "api": ("service.cli.roles:api", "Run only the HTTP API."),
    "planner": ("service.cli.roles:planner", "Run only the control-plane jobs."),
    "worker": ("service.cli.roles:worker", "Run one worker, which leases slices and runs them on an engine."),
    "fleet": (
        "service.cli.fleet:fleet",
        "Keep engines of several models on a Ray cluster, as many as there is work for.",
    ),
    "calibrate": ("service.cli.calibrate:calibrate", "Measure what engine steps cost with this model on this machine."),
    "plan": ("service.cli.plan:plan", "Plan a file without running it."),
    "simulate": ("service.cli.simulate:simulate", "Run a workload through a simulated engine."),
    "profile-slo": ("service.cli.profile_slo:profile_slo", "Find how long a step may be with a batch in it."),
    "demo": (
        "service.cli.demo:demo",
        "Run a file of real requests from nothing each time, and print some of the answers.",
    ),
    "openapi": ("service.cli.openapi:openapi", "Print the OpenAPI description of the HTTP API as YAML."),
}
# Takes any arguments: a command that is not installed has no options of its own.
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}
COMPLETED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # variables in which a shell passes the line to complete


def command_line(called: str) -> typer.Typer:
    """Return an app with all commands by name and help; only the called one is complete."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help="Offline batch inference on SGLang behind an OpenAI-style Batch API.",
        callback=_main,
    )
    has_server = _has_server()
    for name, (place, text) in COMMANDS.items():
        if place.startswith("service.") and not has_server:
            app.command(name, hidden=True, context_settings=ANYTHING)(_needs_server)
        elif name == called:
            module, _, attribute = place.partition(":")
            _add(app, name, getattr(import_module(module), attribute))
        else:
            app.command(name, help=text)(_nothing)
    return app


def command_of_this_line() -> typer.Typer:
    """Return an app that is complete for the command that this process was called with."""
    line = next((os.environ[name].split() for name in COMPLETED if name in os.environ), sys.argv)
    return command_line(next((each for each in line[1:] if not each.startswith("-")), ""))


def _needs_server(context: typer.Context) -> None:
    """Stand for a command of the service where that is not installed."""
    fail(
        f"`batchweave {context.info_name}` runs on a machine of the service: pip install batchweave-server, or "
        "batchweave-server[engine] where an engine runs."
    )


def _has_server() -> bool:
    try:
        distribution("batchweave-server")
    except PackageNotFoundError:
        return False
    return True


def _add(app: typer.Typer, name: str, command: typer.Typer | Callable[..., Any]) -> None:
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"batchweave {version('batchweave')}")
        raise typer.Exit


def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before any command."""


def _nothing() -> None:
    """Placeholder for a command that was not called."""
