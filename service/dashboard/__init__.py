"""The dashboard: web pages at /dashboard, built with Jinja2, htmx and uPlot, with nothing loaded from other hosts."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse

from service.api.bodies import explain
from service.dashboard import actions, batch_pages, new_batch, overview, tenants, views
from service.dashboard.render import page
from service.dashboard.sessions import SignInNeeded
from service.errors import ApiError

PREFIX = "/dashboard"


def add_dashboard(app: FastAPI) -> None:
    app.include_router(actions.router)
    app.include_router(overview.router)
    app.include_router(batch_pages.router)
    app.include_router(new_batch.router)
    app.include_router(views.router)
    app.include_router(tenants.router)
    app.add_api_route("/", _to_dashboard, include_in_schema=False)
    app.add_exception_handler(SignInNeeded, _sign_in)


def _to_dashboard() -> Response:
    return RedirectResponse(PREFIX)


def error_page(request: Request, error: ApiError) -> Response:
    return page(request, "error.html", None, error.status_code, message=error.message, code=error.code)


def wrong_form(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    message = f"{'.'.join(str(part) for part in first['loc'][1:])}: {explain(first)}"
    return page(request, "error.html", None, 400, message=message, code="invalid_request")


def is_page(request: Request) -> bool:
    return request.url.path == PREFIX or request.url.path.startswith(f"{PREFIX}/")


def _sign_in(request: Request, _error: Exception) -> Response:
    if "hx-request" in request.headers:  # part of an open page: redirect the whole page
        return Response(status_code=204, headers={"HX-Redirect": f"{PREFIX}/sign-in"})
    back = request.url.path if request.method == "GET" and not request.url.path.endswith(".json") else PREFIX
    return RedirectResponse(f"{PREFIX}/sign-in?back={back}", status_code=303)
