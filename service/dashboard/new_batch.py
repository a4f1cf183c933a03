"""The page of a new batch, and its form."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from sqlalchemy import select

from service.api import batches, files
from service.api.bodies import CreateBatch, CreateExtras, ObjectId, explain
from service.api.context import Context, InContext
from service.api.idempotency import Again
from service.dashboard.answers import first_url
from service.dashboard.reach import as_owner
from service.dashboard.render import page
from service.dashboard.sessions import Changes, LooksIn, Viewer
from service.dashboard.shown import NAME
from service.db.tables import Model, OutputOrder
from service.endpoints import ENDPOINTS
from service.errors import ApiError, BadRequest, NotFound
from service.requests.parameters import noticed

WINDOWS = {"1h": "1 hour", "6h": "6 hours", "24h": "24 hours", "3d": "3 days", "7d": "7 days"}
ORDERS = {OutputOrder.ANY: "as completed, readable at once", OutputOrder.INPUT: "in the order of the file"}

router = APIRouter(prefix="/dashboard", include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Fields:
    """What the form says about the batch; `metadata` has one "key: value" per line."""

    endpoint: str
    window: str = "24h"
    order: OutputOrder = OutputOrder.ANY
    name: str = ""
    metadata: str = ""

    def pairs(self) -> dict[str, str] | None:
        """Return the batch's metadata with its name. Raises BadRequest for a line that is no pair."""
        found = {NAME: self.name.strip()} if self.name.strip() else {}
        for line in self.metadata.splitlines():
            key, mark, value = line.partition(":")
            if line.strip() and not (mark and key.strip()):
                raise BadRequest(f"Metadata: write {line.strip()[:64]!r} as key: value.", param="metadata")
            if line.strip():
                found[key.strip()] = value.strip()
        return found or None


@router.get("/new")
async def new_batch(
    request: Request, context: InContext, viewer: LooksIn, file: ObjectId | None = None, problem: str = ""
) -> Response:
    return await _page(request, context, viewer, file, None, BadRequest(problem) if problem else None)


@router.post("/batches")
async def create(
    request: Request,
    context: InContext,
    viewer: Changes,
    file: Annotated[ObjectId, Form()],
    endpoint: Annotated[str, Form(max_length=64)],
    window: Annotated[str, Form(pattern=r"^[1-9][0-9]{0,3}[mhd]$")],
    order: Annotated[OutputOrder, Form()] = OutputOrder.ANY,
    hold: Annotated[bool, Form()] = False,
    name: Annotated[str, Form(max_length=512)] = "",
    metadata: Annotated[str, Form(max_length=10_000)] = "",
) -> Response:
    """Create the batch and show it; if it is refused, show the form again with all that it had."""
    fields = Fields(endpoint, window, order, name, metadata)
    try:
        body = CreateBatch(
            input_file_id=file,
            endpoint=endpoint,
            completion_window=window,
            metadata=fields.pairs(),
            batchweave=CreateExtras(output_order=order, hold=hold),
        )
        batch = await batches.create_batch(body, context, await as_owner(context, viewer, file), Again())
    except ApiError as error:
        return await _page(request, context, viewer, file, fields, error)
    except ValidationError as error:
        problem = BadRequest(f"Metadata: {explain(error.errors()[0])}", param="metadata")
        return await _page(request, context, viewer, file, fields, problem)
    return RedirectResponse(f"/dashboard/batches/{batch.id}", status_code=303)


async def _page(
    request: Request,
    context: Context,
    viewer: Viewer,
    file: str | None,
    fields: Fields | None,
    problem: ApiError | None,
) -> Response:
    """Show the form with what is wrong, if anything is; with None for `fields`, as it is at first."""
    status_code = 200 if fields is None or problem is None else problem.status_code
    uploaded, url = None, None
    if file is not None:
        try:
            uploaded = await files.find_file(context, await as_owner(context, viewer, file), file)
        except NotFound:
            if fields is None:
                raise
        else:
            url = await first_url(context, uploaded) if fields is None else None
    if fields is None:  # a line that names no endpoint of ours is an error of the file, which its validation reports
        fields = Fields(url if url in ENDPOINTS else ENDPOINTS[0])
    async with context.database.read() as session:
        models = (await session.scalars(select(Model.name).order_by(Model.name))).all()
    return page(
        request,
        "new.html",
        viewer,
        status_code,
        file=uploaded,
        fields=fields,
        endpoints=ENDPOINTS,
        noticed={path: sorted(noticed(path)) for path in ENDPOINTS},
        models=models,
        windows=WINDOWS,
        orders=ORDERS,
        most_bytes=context.settings.max_file_bytes,
        problem=problem.message[:500] if problem is not None else "",
        wrong_field=problem.param if problem is not None else None,
    )
