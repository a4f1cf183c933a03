"""The option that says which answers a batch accepts."""

from typing import Annotated, Any

import typer

NAMES: dict[str, Any] = {
    "schema": True,
    "finish": "stop",
    "loops": "stop",
    "retries": None,
    "continue": None,
    "thinking_tokens": None,
}


def accept_of(text: str | None) -> dict[str, Any] | None:
    """Return the `accept` of a create: "schema,retries=1" is {"schema": true, "retries": 1}. Raises BadParameter."""
    found: dict[str, Any] = {}
    for each in (text or "").split(","):
        name, equals, value = (part.strip() for part in each.partition("="))
        if not name and not equals:
            continue
        if name not in NAMES:
            raise typer.BadParameter(f"unknown name {name!r}: write some of {', '.join(NAMES)}")
        usual = NAMES[name]
        if usual is None and not (value.isascii() and value.isdecimal()):
            raise typer.BadParameter(f"{name} needs a number: {name}=2")
        if usual is not None and value not in ("", str(usual)):
            raise typer.BadParameter(f"{name} takes no value")
        found[name] = int(value) if usual is None else usual
    return found or None


def _checked(text: str | None) -> str | None:
    accept_of(text)
    return text


AcceptOption = Annotated[
    str | None,
    typer.Option(
        "--accept",
        callback=_checked,
        help="Which answers are good enough, and what to do about others: schema,finish,retries=2,continue=500,loops,"
        "thinking_tokens=4000 or some of these (docs/api.md).",
    ),
]
