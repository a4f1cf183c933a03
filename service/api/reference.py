"""/docs: the API reference for people, rendered from the OpenAPI document; it loads nothing from another host."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:",
    "Cache-Control": "no-store",
}

router = APIRouter(include_in_schema=False)
_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)


@router.get("/docs")
async def reference(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "reference"):  # the same for everyone, so it is rendered once
        state.reference = _drawn(request.app.openapi())
    return HTMLResponse(state.reference, headers=HEADERS)


def _drawn(described: dict[str, Any]) -> str:
    operations = [
        {"method": method.upper(), "path": path, **about}
        for path, methods in described["paths"].items()
        for method, about in methods.items()
    ]
    return _environment.get_template("reference.html").render(
        info=described["info"], operations=operations, schemas=described["components"]["schemas"], shown=_shown
    )


def _shown(schema: Any) -> str:
    """Return a schema's type in a few words; a named schema gives its name, as the page describes it separately."""
    if not isinstance(schema, dict):
        return ""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_shown(each) for each in schema[several])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_shown(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
