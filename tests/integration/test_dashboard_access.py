"""Who may see and change what in the dashboard: keys, sessions, forms of other sites, projects and roles."""

import re

import httpx
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select, update

from service.db.tables import DEFAULT_PROJECT
from service.db.tenant_tables import ApiKey, AuditEvent, Project, Role
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.browsing import PAGES, key_of_another_project, make_key, sign_in
from tests.integration.harness import Harness, jsonl, line
from tests.integration.serving import serve


async def test_a_part_of_a_page_says_where_to_sign_in(guarded: httpx.AsyncClient) -> None:
    answer = await guarded.get("/batches", headers={"HX-Request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (204, "/dashboard/sign-in")


async def test_forms_count_as_requests(pages: httpx.AsyncClient, harness: Harness) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Project).values(max_requests_per_minute=1))
    assert (await pages.post("/batches/batch_x/cancel")).status_code == 404
    answer = await pages.post("/batches/batch_x/cancel")
    assert answer.status_code == 429
    assert "<h1>" in answer.text


async def test_forms_of_other_sites_do_nothing(guarded: httpx.AsyncClient, harness: Harness) -> None:
    text, _ = await make_key(harness.database, Role.USER)
    await sign_in(guarded, text)
    batch_id = await harness.submit(jsonl([line(1)]))
    path, own = f"/batches/{batch_id}/cancel", f"http://{guarded.base_url.netloc.decode()}"
    del guarded.headers["Sec-Fetch-Site"]
    for headers in (
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": own},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": f"{own}.evil.example"},
        {"Origin": "http://["},
    ):
        for form in (path, "/sign-in"):
            refused = await guarded.post(form, headers=headers, data={"key": text})
            assert (refused.status_code, "not sent by a page of this service" in refused.text) == (403, True), headers
    assert (await harness.batch(batch_id)).status == "validating"
    assert (await guarded.post(path, headers={"Origin": own})).status_code == 200  # over HTTP, browsers say no more
    assert (await harness.batch(batch_id)).status == "cancelling"


async def test_signing_in_needs_a_good_key_and_ends_with_it(guarded: httpx.AsyncClient, harness: Harness) -> None:
    text, key_id = await make_key(harness.database, Role.USER)
    for page in (*PAGES, "/overview.json", "/events", "/batches/batch_x/requests"):
        assert (await guarded.get(page)).url.path == "/dashboard/sign-in"
    before = REGISTRY.get_sample_value("batchweave_refused_keys_total", {"where": "sign-in"}) or 0
    refused = await sign_in(guarded, "bw-wrong")
    assert (refused.status_code, "unknown, revoked" in refused.text) == (401, True)
    assert "batchweave_session" not in guarded.cookies
    assert REGISTRY.get_sample_value("batchweave_refused_keys_total", {"where": "sign-in"}) == before + 1
    entered = await sign_in(guarded, text)
    assert entered.url.path == "/dashboard/batches"
    for page in ("/online", "/workers", "/projects", "/audit", "/settings"):  # for the role admin
        assert (await guarded.get(page)).status_code == 403
    async with harness.database.write() as session:
        await session.execute(update(ApiKey).where(ApiKey.id == key_id).values(revoked_at=1))
    assert (await guarded.get("/batches")).url.path == "/dashboard/sign-in"


async def test_the_cookie_cannot_be_read_by_scripts_and_signing_out_ends_it(
    guarded: httpx.AsyncClient, harness: Harness
) -> None:
    text, _ = await make_key(harness.database, Role.OPERATOR)
    answer = await guarded.post("/sign-in", data={"key": text, "back": "https://evil.example"}, follow_redirects=False)
    assert answer.headers["location"] == "/dashboard"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    token = guarded.cookies["batchweave_session"]
    await guarded.post("/sign-out")
    guarded.cookies.set("batchweave_session", token)
    assert (await guarded.get("/settings")).url.path == "/dashboard/sign-in"


async def test_settings_hide_secrets(settings: Settings, clock: Clock, harness: Harness) -> None:
    async with httpx.AsyncClient() as client:
        with serve(settings, clock) as url:
            text = (await client.get(f"{url}/dashboard/settings")).text
    assert "BATCHWEAVE_DATABASE_URL" in text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in text
    assert settings.database_url is not None
    assert settings.database_url not in text


@pytest.mark.parametrize("role", [Role.USER, Role.ADMIN])
async def test_another_projects_batch_is_not_there(guarded: httpx.AsyncClient, harness: Harness, role: Role) -> None:
    batch_id = await harness.submit(jsonl([line(1)]))
    file_id = (await harness.batch(batch_id)).input_file_id
    await sign_in(guarded, await key_of_another_project(harness, role))
    for path in (
        f"/batches/{batch_id}",
        *(f"/batches/{batch_id}/{tab}" for tab in ("requests", "errors", "schedule", "files")),
        *(f"/batches/{batch_id}/{name}" for name in ("points.json", "errors.jsonl")),
        f"/batches/{batch_id}/request?custom_id=a",
        f"/files/{file_id}/content",
        f"/new?file={file_id}",
    ):
        assert (await guarded.get(path)).status_code == 404
    for path in (f"/batches/{batch_id}/cancel", f"/batches/{batch_id}/start", f"/files/{file_id}/delete"):
        assert (await guarded.post(path)).status_code == 404
    for path in ("/batches", "/batches?project=default", "/files", ""):
        shown = (await guarded.get(path)).text
        assert batch_id not in shown
        assert file_id not in shown
    async with harness.database.write() as session:
        session.add(AuditEvent(at=0, project_id=DEFAULT_PROJECT, actor="cli", action="a.secret", object_id="x"))
    assert "a.secret" not in (await guarded.get("/audit")).text
    for path in ("/projects", "/projects/proj_x", "/keys", "/keys/key_x/revoke"):
        assert (await guarded.post(path, data={"name": "x", "weight": 1})).status_code == 403


async def test_all_of_the_audit_log_can_be_seen(pages: httpx.AsyncClient, harness: Harness) -> None:
    async with harness.database.write() as session:
        for n in range(120):
            session.add(AuditEvent(at=n, project_id=DEFAULT_PROJECT, actor="cli", action=f"act.{n:03}", object_id="x"))
    seen, path = list[str](), "/audit"
    while path:
        text = (await pages.get(path)).text
        seen += re.findall(r"act\.\d{3}", text)
        found = re.search(r"/dashboard(/audit\?before=\d+)", text)
        path = found[1] if found else ""
    assert seen == [f"act.{n:03}" for n in reversed(range(120))]


async def test_an_operator_sees_every_project_and_acts_there(guarded: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1)]))
    file_id = (await harness.batch(batch_id)).input_file_id
    await sign_in(guarded, await key_of_another_project(harness, Role.OPERATOR))
    assert batch_id in (await guarded.get("/batches", params={"project": "default"})).text
    assert batch_id not in (await guarded.get("/batches", params={"project": "other"})).text
    assert "request 1" in (await guarded.get(f"/files/{file_id}/content")).text
    assert file_id in (await guarded.get("/files")).text
    assert (await guarded.get(f"/batches/{batch_id}/requests")).status_code == 200
    assert (await guarded.get(f"/batches/{batch_id}/requests", headers={"hx-request": "true"})).status_code == 200
    assert "cancelling" in (await guarded.post(f"/batches/{batch_id}/cancel")).text
    async with harness.database.read() as session:
        events = (await session.scalars(select(AuditEvent).order_by(AuditEvent.seq))).all()
        key = (await session.scalars(select(ApiKey))).one()
    assert [(each.action, each.object_id, each.project_id) for each in events[-4:]] == [
        ("session.sign_in", key.id, key.project_id),
        ("texts.read", file_id, DEFAULT_PROJECT),
        ("texts.read", batch_id, DEFAULT_PROJECT),
        ("batch.cancel", batch_id, DEFAULT_PROJECT),
    ]
    assert {each.actor for each in events[-4:]} == {key.id}


async def test_projects_and_quotas_are_made_and_changed(pages: httpx.AsyncClient, harness: Harness) -> None:
    made = await pages.post("/projects", data={"name": "evaluation / co"})
    assert "evaluation / co" in made.text
    again = await pages.post("/projects", data={"name": "evaluation / co"})
    assert "there is already a project" in again.text
    async with harness.database.read() as session:
        project = (await session.scalars(select(Project).where(Project.name == "evaluation / co"))).one()
    path = f"/projects/{project.id}"
    assert "no limit" in (await pages.get(path)).text
    saved = await pages.post(path, data={"weight": "2.5", "max_batches": "7", "max_bytes": ""})
    assert saved.status_code == 200
    assert 'value="7"' in (await pages.get(path)).text
    async with harness.database.read() as session:
        project = (await session.scalars(select(Project).where(Project.name == "evaluation / co"))).one()
    assert (project.weight, project.max_batches, project.max_bytes) == (2.5, 7, None)
    for tier in ("priority", ""):  # a field that a browser sends empty changes nothing
        await pages.post(path, data={"weight": "2.5", "tier": tier})
        assert "<option selected>priority</option>" in (await pages.get(path)).text
    await pages.post(path, data={"weight": "2.5"})  # of what a form has not, nothing is said
    assert 'value="7"' in (await pages.get(path)).text
    assert "weight 2.5, max_batches 7" in (await pages.get("/audit")).text
    for wrong in (
        {"weight": "0"},
        {"weight": "nan"},
        {"weight": "1", "max_batches": "-1"},
        {"weight": "1", "max_requests_per_minute": "0"},
        {"weight": "1", "max_bytes": "9" * 30},
    ):
        assert (await pages.post(path, data=wrong)).status_code == 400
    assert (await pages.get("/projects/nobody")).status_code == 404
    assert "is not a valid name" in (await pages.post("/projects", data={"name": "a\tb"})).text


async def test_a_key_is_shown_once_and_revoked(guarded: httpx.AsyncClient, harness: Harness) -> None:
    text, _ = await make_key(harness.database, Role.OPERATOR)
    await sign_in(guarded, text)
    form = {"name": "bob", "project": DEFAULT_PROJECT, "role": "user", "days": "2"}
    shown = (await guarded.post("/keys", data=form)).text
    found = re.search(r"bw-[\w-]{43}", shown)
    assert found
    assert found[0] not in (await guarded.get("/projects")).text
    async with harness.database.read() as session:
        key = (await session.scalars(select(ApiKey).where(ApiKey.name == "bob"))).one()
    assert key.expires_at == int(harness.clock.now) + 2 * 86400
    server = str(guarded.base_url).removesuffix("/dashboard/")
    async with httpx.AsyncClient(base_url=server, headers={"Authorization": f"Bearer {found[0]}"}) as client:
        assert (await client.get("/v1/batches")).status_code == 200
        await guarded.post(f"/keys/{key.id}/revoke")
        assert (await client.get("/v1/batches")).status_code == 401
    assert "is already revoked" in (await guarded.post(f"/keys/{key.id}/revoke")).text
    assert (await guarded.post("/keys", data={**form, "project": "nobody"})).status_code == 404


async def test_no_key_is_made_where_none_is_asked_for(pages: httpx.AsyncClient, harness: Harness) -> None:
    form = {"name": "eve", "project": DEFAULT_PROJECT, "role": "operator"}
    assert "requires no API keys" in (await pages.post("/keys", data=form)).text
    async with harness.database.read() as session:
        assert (await session.scalars(select(ApiKey))).all() == []
