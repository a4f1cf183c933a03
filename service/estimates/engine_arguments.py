"""Knows the names of SGLang's server arguments without importing SGLang, which takes ten seconds."""

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any


def argument_fault(arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a number of GPUs, or with the first name that SGLang does not know; else None.

    Where SGLang is not installed, all names are taken.
    """
    for name in ("tp_size", "pp_size", "dp_size"):
        if not isinstance(size := arguments.get(name, 1), int) or isinstance(size, bool) or size < 1:
            return f"{name} must be a whole number, 1 or more, not {size!r:.40}"
    known = known_arguments()
    for name in arguments:
        if known and name not in known:
            close = get_close_matches(name, known, 1)
            return f"SGLang has no argument {name!r:.80}" + (f"; did you mean {close[0]}?" if close else "")
    return None


@lru_cache(maxsize=1)
def known_arguments() -> frozenset[str]:
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(found.origin).parent / "srt" / "server_args.py").read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    fields = (
        each.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )
    return frozenset(fields)
