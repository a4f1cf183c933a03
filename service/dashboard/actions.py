"""The dashboard's forms: each does the same as an API call, as the signed-in viewer, then redirects to a page."""

from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse

from service.api import batches, files, workers
from service.api.bodies import ObjectId, RetryBatch
from service.api.caller import note_refused_key
from service.api.context import InContext
from service.api.idempotency import Again
from service.dashboard.reach import as_owner
from service.dashboard.render import page
from service.dashboard.sessions import (
    Changes,
    ChangesAsOperator,
    SignInNeeded,
    check_form,
    set_cookie,
    sign_in,
    sign_out,
    viewer_of,
)
from service.errors import ApiError
from service.objects.request_output import MOST_TOKENS
from service.objects.shards import RetryOutcome

router = APIRouter(prefix="/dashboard", include_in_schema=False)
SHORT = 2048


@router.get("/sign-in")
async def sign_in_page(
    request: Request, context: InContext, back: Annotated[str, Query(max_length=SHORT)] = "/dashboard"
) -> Response:
    try:
        await viewer_of(request, context)
    except SignInNeeded:
        return page(request, "sign_in.html", None, back=back, problem="")
    return _to(_own(back))


@router.post("/sign-in")
async def sign_in_form(
    request: Request,
    context: InContext,
    key: Annotated[str, Form(max_length=256)],
    back: Annotated[str, Form(max_length=SHORT)] = "/dashboard",
) -> Response:
    check_form(request)
    async with context.database.write() as session:
        token = await sign_in(session, key, int(context.clock()))
    if token is None:
        note_refused_key(request, "sign-in")
        problem = "This key is unknown, revoked or has expired. Create one with `batchweave keys create`."
        return page(request, "sign_in.html", None, status_code=401, back=_own(back), problem=problem)
    response = _to(_own(back))
    set_cookie(request, response, token)  # a new token, which cannot be known from before the sign-in
    return response


@router.post("/sign-out")
async def sign_out_form(request: Request, context: InContext, viewer: Changes) -> Response:
    if viewer.token is not None:
        async with context.database.write() as session:
            await sign_out(session, viewer.caller, viewer.token, context.clock())
    return _to("/dashboard/sign-in")


@router.post("/files")
async def upload(request: Request, context: InContext, viewer: Changes) -> Response:
    try:
        file = await files.create_file(request, context, viewer.caller)
    except ApiError as error:
        return _to("/dashboard/new", problem=error.message)
    return _to("/dashboard/new", file=file.id)


@router.post("/batches/{batch_id}/start")
async def start(context: InContext, viewer: Changes, batch_id: ObjectId) -> Response:
    await batches.start_batch(batch_id, context, await as_owner(context, viewer, batch_id))
    return _to(f"/dashboard/batches/{batch_id}")


@router.post("/batches/{batch_id}/cancel")
async def cancel(context: InContext, viewer: Changes, batch_id: ObjectId) -> Response:
    await batches.cancel_batch(batch_id, context, await as_owner(context, viewer, batch_id))
    return _to(f"/dashboard/batches/{batch_id}")


@router.post("/batches/{batch_id}/retry")
async def retry(
    context: InContext,
    viewer: Changes,
    batch_id: ObjectId,
    outcome: Annotated[RetryOutcome, Form()] = RetryOutcome.FAILED,
    max_tokens: Annotated[int | None, Form(ge=1, le=MOST_TOKENS)] = None,
) -> Response:
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    wanted = RetryBatch.model_validate({"outcomes": [outcome], **limit})
    batch = await batches.retry_batch(batch_id, context, await as_owner(context, viewer, batch_id), Again(), wanted)
    return _to(f"/dashboard/batches/{batch.id}")


@router.post("/files/{file_id}/delete")
async def delete(context: InContext, viewer: Changes, file_id: ObjectId) -> Response:
    await files.delete_file(file_id, context, await as_owner(context, viewer, file_id))
    return _to("/dashboard/files")


@router.post("/workers/{name:path}/drain")
async def drain(context: InContext, viewer: ChangesAsOperator, name: workers.WorkerName) -> Response:
    await workers.drain_worker(name, context, viewer.caller)
    return _to("/dashboard/workers")


@router.post("/workers/{name:path}/resume")
async def resume(context: InContext, viewer: ChangesAsOperator, name: workers.WorkerName) -> Response:
    await workers.resume_worker(name, context, viewer.caller)
    return _to("/dashboard/workers")


def _own(back: str) -> str:
    """Return `back` if it is a page of the dashboard, otherwise the overview."""
    return back if back == "/dashboard" or back.startswith("/dashboard/") else "/dashboard"


def _to(path: str, **query: str) -> RedirectResponse:
    return RedirectResponse(path + (f"?{urlencode(query, quote_via=quote)}" if query else ""), status_code=303)
