"""Keys, projects and quotas through the official client."""

from collections.abc import Generator
from io import BytesIO
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select, update

from service.db.sessions import Database
from service.db.tables import DEFAULT_PROJECT, Batch, BatchStatus
from service.db.tenant_tables import ApiKey, AuditEvent, Project, Role
from service.errors import SettingsError
from service.settings import Settings, load_settings
from service.tenants.keys import new_key
from tests.conftest import Clock
from tests.integration.serving import CHAT, serve

OTHER = "proj_other"


@pytest.fixture
def url(settings: Settings, clock: Clock) -> Generator[str, None, None]:
    with serve(settings.model_copy(update={"auth": "keys", "max_file_bytes": 100_000}), clock) as found:
        yield found


@pytest.fixture
async def clients(url: str, database: Database, clock: Clock) -> dict[str, openai.OpenAI]:
    """A client of two projects each, and an administrator of the first."""
    made: dict[str, openai.OpenAI] = {}
    async with database.write() as session:
        session.add(Project(id=OTHER, name="other", weight=1.0, created_at=0))
        await session.flush()
        for name, project, role in (
            ("mine", DEFAULT_PROJECT, Role.USER),
            ("theirs", OTHER, Role.USER),
            ("admin", DEFAULT_PROJECT, Role.ADMIN),
            ("their admin", OTHER, Role.ADMIN),
        ):
            text, row = new_key(project, name, role, int(clock()), int(clock()) + 3600)
            session.add(row)
            made[name] = openai.OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0)
    return made


def upload(client: openai.OpenAI, content: bytes = b'{"a": 1}\n') -> str:
    return client.files.create(file=("in.jsonl", BytesIO(content)), purpose="batch").id


def create(client: openai.OpenAI, file_id: str | None = None) -> str:
    file_id = file_id or upload(client)
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h").id


async def limit(database: Database, **quotas: int) -> None:
    async with database.write() as session:
        await session.execute(update(Project).where(Project.id == DEFAULT_PROJECT).values(**quotas))


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/models", "/v1/files/file-1/content"])
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer bw-wrong"}, {"Authorization": "Basic eDp5"}])
def test_without_a_good_key_nothing_is_shown(url: str, path: str, header: dict[str, str]) -> None:
    found = httpx.get(f"{url}{path}", headers=header)
    assert found.status_code == 401
    assert found.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")
    assert found.headers["www-authenticate"] == "Bearer"


async def test_revoked_and_expired_keys_are_refused(
    clients: dict[str, openai.OpenAI], database: Database, clock: Clock
) -> None:
    clients["mine"].files.list()
    async with database.write() as session:
        await session.execute(update(ApiKey).where(ApiKey.name == "mine").values(revoked_at=1))
    with pytest.raises(openai.AuthenticationError):
        clients["mine"].files.list()
    clients["theirs"].files.list()
    clock.now += 3600
    with pytest.raises(openai.AuthenticationError):
        clients["theirs"].files.list()


async def test_a_key_is_kept_as_a_digest_alone(clients: dict[str, openai.OpenAI], database: Database) -> None:
    async with database.read() as session:
        rows = (await session.scalars(select(ApiKey))).all()
    texts = [client.api_key for client in clients.values()]
    kept = [str(value) for row in rows for value in vars(row).values()]
    assert not [text for text in texts if any(text in value for value in kept)]
    assert all(len(text) > 40 for text in texts)


def test_another_projects_objects_are_not_found(clients: dict[str, openai.OpenAI]) -> None:
    mine, theirs = clients["mine"], clients["theirs"]
    file_id = upload(mine)
    batch_id = create(mine, file_id)
    upload_id = mine.uploads.create(bytes=1, filename="a", mime_type="a", purpose="batch").id
    calls: list[Any] = [
        lambda: theirs.uploads.parts.create(upload_id, data=b"x"),
        lambda: theirs.uploads.complete(upload_id, part_ids=[]),
        lambda: theirs.uploads.cancel(upload_id),
        lambda: theirs.post(f"/batches/{batch_id}/retry", cast_to=object),
        lambda: theirs.files.retrieve(file_id),
        lambda: theirs.files.content(file_id),
        lambda: theirs.files.delete(file_id),
        lambda: theirs.batches.retrieve(batch_id),
        lambda: theirs.batches.cancel(batch_id),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError, match="No such File"):
        create(theirs, file_id)
    for page in (theirs.files.list(), theirs.batches.list()):
        assert page.data == []
    with pytest.raises(openai.BadRequestError):
        theirs.files.list(after=file_id)
    assert mine.batches.retrieve(batch_id).status == "validating"
    assert [each.id for each in clients["admin"].files.list()] == [file_id]


def test_webhooks_need_an_administrator_of_the_project(clients: dict[str, openai.OpenAI]) -> None:
    wanted = {"name": "x", "url": "https://example.com/", "event_types": ["batch.completed"]}
    made: Any = clients["admin"].post("/webhook_endpoints", cast_to=object, body=wanted)
    path = f"/webhook_endpoints/{made['id']}"
    calls: list[Any] = [
        lambda client: client.post("/webhook_endpoints", cast_to=object, body=wanted),
        lambda client: client.get("/webhook_endpoints", cast_to=object),
        lambda client: client.get(path, cast_to=object),
        lambda client: client.post(path, cast_to=object, body={"name": "y"}),
        lambda client: client.post(f"{path}/rotate_secret", cast_to=object),
        lambda client: client.post(f"{path}/test", cast_to=object, body={"event_type": "batch.completed"}),
        lambda client: client.delete(path, cast_to=object),
    ]
    for call in calls:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            call(clients["mine"])
        assert caught.value.code == "insufficient_permissions"
    for call in calls[2:]:
        with pytest.raises(openai.NotFoundError):
            call(clients["their admin"])


def test_an_idempotency_key_is_its_projects_own(clients: dict[str, openai.OpenAI]) -> None:
    made = {
        name: clients[name]
        .batches.create(
            input_file_id=upload(clients[name]),
            endpoint=CHAT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": "same"},
        )
        .id
        for name in ("mine", "theirs")
    }
    assert made["mine"] != made["theirs"]


async def test_batches_quota_gives_back_when_one_ends(clients: dict[str, openai.OpenAI], database: Database) -> None:
    await limit(database, max_batches=2)
    first, _ = create(clients["mine"]), create(clients["mine"])
    create(clients["theirs"])
    with pytest.raises(openai.RateLimitError) as caught:
        create(clients["mine"])
    assert caught.value.code == "batches_quota"
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.response.headers["x-should-retry"] == "false"
    async with database.write() as session:
        await session.execute(update(Batch).where(Batch.id == first).values(status=BatchStatus.COMPLETED))
    create(clients["mine"])


async def test_enqueued_tokens_quota_gives_back_when_one_ends(
    clients: dict[str, openai.OpenAI], database: Database
) -> None:
    await limit(database, max_enqueued_tokens=100)
    first = create(clients["mine"])
    async with database.write() as session:
        await session.execute(update(Batch).where(Batch.id == first).values(prompt_tokens=100))
    with pytest.raises(openai.RateLimitError) as caught:
        create(clients["mine"])
    assert caught.value.code == "enqueued_tokens_quota"
    async with database.write() as session:
        await session.execute(update(Batch).where(Batch.id == first).values(status=BatchStatus.EXPIRED))
    create(clients["mine"])


async def test_bytes_quota(clients: dict[str, openai.OpenAI], database: Database, settings: Settings) -> None:
    await limit(database, max_bytes=1000)
    kept = upload(clients["mine"], b"x" * 900)
    with pytest.raises(openai.RateLimitError) as caught:
        upload(clients["mine"], b"x" * 200)
    assert caught.value.code == "bytes_quota"
    with pytest.raises(openai.APIStatusError) as never:
        upload(clients["mine"], b"x" * 1001)
    assert never.value.status_code == 413
    folder = settings.data_dir / "objects" / "files"
    assert [path.name for path in folder.iterdir()] == [kept]
    clients["mine"].files.delete(kept)
    upload(clients["mine"], b"x" * 200)


async def test_requests_per_minute(clients: dict[str, openai.OpenAI], database: Database, clock: Clock) -> None:
    await limit(database, max_requests_per_minute=3)
    for _ in range(3):
        clients["mine"].files.list()
    with pytest.raises(openai.RateLimitError) as caught:
        clients["mine"].files.list()
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 61
    clients["theirs"].files.list()
    clock.now += 60
    clients["mine"].files.list()


async def test_changes_are_in_the_audit_log(clients: dict[str, openai.OpenAI], database: Database) -> None:
    file_id = upload(clients["mine"])
    batch_id = create(clients["mine"], file_id)
    clients["admin"].batches.cancel(batch_id)
    clients["admin"].batches.cancel(batch_id)  # changes nothing
    async with database.read() as session:
        events = (await session.scalars(select(AuditEvent).order_by(AuditEvent.seq))).all()
        keys = {row.name: row.id for row in (await session.scalars(select(ApiKey))).all()}
    assert [(event.actor, event.action, event.object_id) for event in events] == [
        (keys["mine"], "file.create", file_id),
        (keys["mine"], "batch.create", batch_id),
        (keys["admin"], "batch.cancel", batch_id),
    ]


def test_without_keys_only_local_names_are_answered(settings: Settings, clock: Clock) -> None:
    with serve(settings, clock) as url:
        assert httpx.get(f"{url}/v1/files").status_code == 200
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "http://["}):
            found = httpx.get(f"{url}/v1/files", headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (403, "not_local")


def test_keys_are_off_only_on_loopback() -> None:
    assert not load_settings(host="127.0.0.1").needs_keys
    assert load_settings(host="127.0.0.1", auth="keys").needs_keys
    assert load_settings(host="0.0.0.0").needs_keys
    with pytest.raises(SettingsError, match="BATCHWEAVE_AUTH"):
        load_settings(host="0.0.0.0", auth="none")


def test_a_body_over_the_limit_is_refused(url: str) -> None:
    """Before any key is asked for."""

    def endless() -> Generator[bytes, None, None]:
        for _ in range(64):
            yield b" " * 65536

    found = httpx.post(f"{url}/v1/batches", content=endless())
    assert found.status_code == 413
    assert found.headers["x-request-id"].startswith("req_")
