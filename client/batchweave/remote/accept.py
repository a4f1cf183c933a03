"""The option that says which answers a batch accepts."""

from typing import Annotated, Any

import typer

NAMES: dict[str, Any] = {
    "schema": True,
    "finish": "stop",
    "loops": "stop",
    "retries": None,
    "explain": True,
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
    if found.get("explain") and not (found.get("schema") and found.get("retries")):
        raise typer.BadParameter("explain needs schema and retries: another try is told what was not valid")
    if found.get("retries") and not found.keys() & {"schema", "finish"}:
        raise typer.BadParameter("retries needs schema or finish: they say which answers are asked again")
    return found or None


def _checked(text: str | None) -> str | None:
    accept_of(text)
    return text


AcceptOption = Annotated[
    str | None,
    typer.Option(
        "--accept",
        callback=_checked,
        help="Take only good answers, by names with commas between: schema (valid JSON), finish (not cut off, looped "
        "or refused); about others: retries=2, explain (tells a try what was not valid), continue=500 (more tokens), "
        "loops (stops them), thinking_tokens=4000.",
    ),
]
