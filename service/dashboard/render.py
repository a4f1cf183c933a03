"""Renders pages from templates, with headers that block content from anywhere else."""

import time
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from batchweave.terminal import duration
from service.dashboard.sessions import Viewer

ROOT = Path(__file__).parent
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def span(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def size(count: float) -> str:
    """Format a number of bytes for people to read."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def moment(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def short(name: str) -> str:
    """Return the beginning of an ID, enough to tell it from others on a page."""
    head, mark, bits = name.partition("_" if "_" in name else "-")
    return f"{head}{mark}{bits[:6]}…" if len(bits) > 8 else name


_environment = Environment(
    loader=FileSystemLoader(ROOT / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_environment.filters.update(duration=span, size=size, number=number, moment=moment, share=share, short=short)


def page(request: Request, name: str, viewer: Viewer | None, status_code: int = 200, **values: Any) -> Response:
    context = request.app.state.context
    html = _environment.get_template(name).render(
        viewer=viewer,
        path=request.url.path,
        now=context.clock(),
        room=context.storage.room,
        **values,
    )
    return HTMLResponse(html.encode(errors="replace"), status_code=status_code, headers=HEADERS)
