"""Writes docs/settings.md from the settings themselves: `python -m service.cli.settings_page > docs/settings.md`."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from service.dashboard.settings_list import grouped
from service.settings import Settings, variable

HEAD = """# Settings

Written by `make settings` from `service/settings.py`; do not edit. Every setting is a variable; a misspelt one that
begins with `BATCHWEAVE_` stops the start. Where no default stands, the description says what happens without one.
`batchweave` commands for a running service read `BATCHWEAVE_URL` and `BATCHWEAVE_API_KEY` instead (docs/cli.md).
"""
TABLE = """| variable | default | meaning |
|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    groups = [
        f"\n## {heading}\n{TABLE}" + "".join(f"{_row(name, Settings.model_fields[name])}\n" for name in names)
        for heading, names in grouped().items()
    ]
    return HEAD + "".join(groups)


def _row(name: str, field: FieldInfo) -> str:
    also = getattr(field.validation_alias, "choices", None)
    names = [f"`{each}`" for each in (also or [variable(name)])]
    others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
    meaning = (field.description or "").replace("|", "\\|")
    return f"| {names[0]} | {_default(field.default)} | {meaning}{others} |"


def _default(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, Enum | Path | str):
        return f"`{value}`"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(page(), end="")
