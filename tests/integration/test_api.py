"""The HTTP API as the official client sees it, over a real socket."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from service.app import create_app
from service.settings import Settings, load_settings
from tests.conftest import Clock
from tests.integration.serving import CHAT, serve

UPLOAD = {"bytes": 1, "filename": "a", "mime_type": "text/jsonl", "purpose": "batch"}


@pytest.fixture
def url(settings: Settings, clock: Clock) -> Generator[str, None, None]:
    with serve(settings.model_copy(update={"max_file_bytes": 100_000}), clock) as found:
        yield found


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def upload(client: openai.OpenAI, content: bytes = b'{"a": 1}\n') -> str:
    return client.files.create(file=("in.jsonl", BytesIO(content)), purpose="batch").id


def create(client: openai.OpenAI, **changes: Any) -> Batch:
    arguments: Any = {"endpoint": CHAT, "completion_window": "24h", **changes}
    if "input_file_id" not in arguments:
        arguments["input_file_id"] = upload(client)
    return client.batches.create(**arguments)


def test_file_has_every_field_and_comes_back_whole(client: openai.OpenAI, clock: Clock) -> None:
    content = "ünïcode\n".encode() * 1000
    made = client.files.create(
        file=("naïve name.jsonl", BytesIO(content)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert made.model_dump() == {
        "id": made.id,
        "object": "file",
        "bytes": len(content),
        "created_at": int(clock()),
        "expires_at": int(clock()) + 7200,
        "filename": "naïve name.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert made.id.startswith("file-")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert client.files.wait_for_processing(made.id).id == made.id
    deleted = client.files.delete(made.id)
    assert deleted.model_dump() == {"id": made.id, "object": "file", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_fields_of_a_create_that_are_ignored_are_named(client: openai.OpenAI, url: str) -> None:
    fields = {"metdata": {"a": "b"}, "custom_llm_provider": "x"}
    made = create(client, extra_body=fields)
    found = client.batches.retrieve(made.id).model_dump()["batchweave"]["unknown_fields"]
    assert found == [{"name": "metdata", "similar": "metadata"}, {"name": "custom_llm_provider", "similar": None}]
    many = create(client, extra_body={f"x{n}" * 100: n for n in range(100)})
    told = many.model_dump()["batchweave"]["unknown_fields"]
    assert (len(told), {len(each["name"]) for each in told}) == (16, {64})
    assert create(client).model_dump()["batchweave"]["unknown_fields"] == []


def test_a_create_that_is_tried_again_is_the_first_one(client: openai.OpenAI, clock: Clock) -> None:
    file = upload(client)

    def again(count: int, **changes: Any) -> str:
        headers = {"x-stainless-retry-count": str(count)}
        return create(client, **{"input_file_id": file, "extra_headers": headers, **changes}).id

    first = again(0)
    assert again(1) == again(2) == first
    assert again(1, metadata={"other": "body"}) != first
    second = again(0)  # wanted twice
    assert second != first
    assert again(1) == second
    clock.now += 3600
    assert again(1) != second


def test_an_idempotency_key_makes_one_batch(client: openai.OpenAI, url: str) -> None:
    file = upload(client)
    headers = {"Idempotency-Key": "one"}
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: create(client, input_file_id=file, extra_headers=headers).id, range(16))
    [one] = set(made)
    assert create(client, input_file_id=file, extra_headers={"Idempotency-Key": "two"}).id != one
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, input_file_id=file, metadata={"a": "b"}, extra_headers=headers)
    assert refused.value.code == "idempotency_key_reused"
    with pytest.raises(openai.BadRequestError):
        create(client, input_file_id=file, extra_headers={"Idempotency-Key": "k" * 256})


def test_batch_has_every_key(client: openai.OpenAI, url: str, clock: Clock) -> None:
    batch = create(client, completion_window="90m", metadata={"team": "evals"})
    raw = httpx.get(f"{url}/v1/batches/{batch.id}").json()
    nulls = {"model", "errors", "output_file_id", "error_file_id"}
    nulls |= {f"{at}_at" for at in ("in_progress", "finalizing", "completed", "failed", "expired")}
    nulls |= {"cancelling_at", "cancelled_at"}
    assert {key for key, value in raw.items() if value is None} == nulls
    assert raw["expires_at"] == int(clock()) + 5400
    assert raw["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert raw["usage"] == {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"team": "evals"})


def test_pages_hold_each_object_once_also_while_rows_are_inserted(client: openai.OpenAI) -> None:
    files = [upload(client) for _ in range(11)]
    seen: list[str] = []
    for each in client.files.list(limit=3):
        seen.append(each.id)
        if len(seen) in (2, 5, 7):
            upload(client)
    assert seen == files[::-1]
    assert [each.id for each in client.files.list(limit=4, order="asc")][:11] == files
    batches = [create(client, input_file_id=files[0]).id for _ in range(7)]
    for limit in (1, 3, 7, 100):
        assert [each.id for each in client.batches.list(limit=limit)] == batches[::-1]
    page = client.batches.list(limit=7)
    assert not page.has_more


def test_deleting_while_listing_reaches_every_file(client: openai.OpenAI) -> None:
    files = [upload(client) for _ in range(7)]
    seen: list[str] = []
    for each in client.files.list(limit=2):
        seen.append(each.id)
        client.files.delete(each.id)
    assert seen == files[::-1]
    assert client.files.list().data == []


def test_list_has_its_cursors(client: openai.OpenAI, url: str) -> None:
    assert httpx.get(f"{url}/v1/batches").json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    first, second = upload(client), upload(client)
    found = httpx.get(f"{url}/v1/files?limit=1").json()
    assert (found["first_id"], found["last_id"], found["has_more"]) == (second, second, True)
    assert httpx.get(f"{url}/v1/files?after={first}").json()["data"] == []
    assert httpx.get(f"{url}/v1/files?purpose=batch_output").json()["data"] == []


@pytest.mark.parametrize("header", ["bytes=0-3", "bytes=5-", "bytes=-4", "bytes=2-1000"])
def test_range_gives_that_part(client: openai.OpenAI, url: str, header: str) -> None:
    content = b"0123456789"
    found = httpx.get(f"{url}/v1/files/{upload(client, content)}/content", headers={"Range": header})
    wanted = {"bytes=0-3": content[0:4], "bytes=5-": content[5:], "bytes=-4": content[-4:], "bytes=2-1000": content[2:]}
    assert (found.status_code, found.content) == (206, wanted[header])
    assert found.headers["content-range"].endswith("/10")


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=99999999999999999999-", "bytes=20-30", "bytes=-0"])
def test_range_outside_is_416(client: openai.OpenAI, url: str, header: str) -> None:
    found = httpx.get(f"{url}/v1/files/{upload(client, b'0123456789')}/content", headers={"Range": header})
    assert found.status_code == 416


@pytest.mark.parametrize("header", ["bytes=4-2", "lines=1-2", "bytes=-", "bytes=0-1,3-4", "zorg"])
def test_range_that_says_nothing_is_ignored(client: openai.OpenAI, url: str, header: str) -> None:
    found = httpx.get(f"{url}/v1/files/{upload(client, b'0123456789')}/content", headers={"Range": header})
    assert (found.status_code, found.content) == (200, b"0123456789")


def test_content_is_never_406_and_knows_its_version(client: openai.OpenAI, url: str) -> None:
    at = f"{url}/v1/files/{upload(client, b'abc')}/content"
    found = httpx.get(at, headers={"Accept": "application/binary"})
    assert (found.status_code, found.content) == (200, b"abc")
    again = httpx.get(at, headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_cancel_is_repeatable_and_an_unknown_batch_is_404(client: openai.OpenAI) -> None:
    batch = create(client)
    first = client.batches.cancel(batch.id)
    assert first.status == "cancelling"
    assert client.batches.cancel(batch.id).cancelling_at == first.cancelling_at
    for call in (client.batches.cancel, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError):
            call("batch_none")


def test_file_of_a_running_batch_is_not_deleted(client: openai.OpenAI) -> None:
    batch = create(client)
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    assert client.files.retrieve(batch.input_file_id).id == batch.input_file_id


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"extra_body": {"batchweave": {"accept": {"retries": 2}}}}, "batchweave.accept"),
        ({"extra_body": {"batchweave": []}}, "batchweave"),
    ],
)
def test_wrong_batch_is_refused_with_its_field(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **changes)
    assert str(caught.value.param).startswith(param)
    assert caught.value.type == "invalid_request_error"
    for words in ("Value error", "Dictionary should", "valid dictionary", "after validation"):  # of a library
        assert words not in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files/file-none", 404),
        ("DELETE", "/v1/files/file-none", 404),
        ("GET", "/v1/files/..%2f..%2fetc%2fpasswd/content", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/files/%00", 404),
        ("PUT", "/v1/files", 405),
        ("GET", "/v1/files?limit=0", 400),
        ("GET", "/v1/files?limit=x", 400),
        ("GET", "/v1/files?order=up", 400),
        ("GET", "/v1/files?after=file-none", 400),
        ("GET", "/v1/files?after=%00", 400),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/batches/" + "b" * 5000, 404),
        ("GET", "/v1/batches?limit=101", 400),
        ("POST", "/v1/batches", 400),
        ("POST", "/v1/files", 400),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_error_has_the_envelope(url: str, method: str, path: str, status: int) -> None:
    found = httpx.request(method, f"{url}{path}")
    assert found.status_code == status
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_broken_json_is_a_bad_request(url: str) -> None:
    found = httpx.post(f"{url}/v1/batches", content=b"{", headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")


def test_large_file_is_413_and_leaves_nothing(client: openai.OpenAI, settings: Settings) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        upload(client, b"x" * 100_001)
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    assert client.files.list().data == []
    assert not [path for path in (settings.data_dir / "objects").rglob("*") if path.is_file()]


def test_upload_for_another_purpose_is_refused_and_leaves_nothing(client: openai.OpenAI, settings: Settings) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a", BytesIO(b"x")), purpose="fine-tune")
    assert caught.value.param == "purpose"
    assert not [path for path in (settings.data_dir / "objects").rglob("*") if path.is_file()]


def test_health_and_readiness(url: str) -> None:
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    ready = httpx.get(f"{url}/readyz").json()
    assert (ready["status"], ready["workers"], ready["starting"], ready["stalled"]) == ("ready", 0, 0, 0)


def test_not_ready_without_redis(settings: Settings) -> None:
    from fastapi.testclient import TestClient

    broken = load_settings(**{**settings.model_dump(), "redis_url": "unix:///nonexistent/redis.sock"})
    with TestClient(create_app(broken), base_url="http://127.0.0.1") as client:
        found = client.get("/readyz")
        assert (found.status_code, found.json()["error"]["param"]) == (503, "redis")
        assert found.headers["retry-after"] == "2"
        assert client.get("/v1/batches").status_code == 200


def test_a_failure_of_ours_says_nothing_but_its_request_id(settings: Settings) -> None:
    from fastapi.testclient import TestClient

    app = create_app(settings)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("secret")

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        found = client.get("/broken")
    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert found.headers["x-request-id"].startswith("req_")
    assert "secret" not in found.text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            {"url": "/v1/files", "data": {"purpose": "batch", "expires_after": "{}"}, "files": {"file": b"x"}},
            "Unknown field 'expires_after'",
        ),
        (
            {"url": "/v1/files", "data": {"purpose": "batch"}, "files": {"upload": b"x"}},
            "The file must be in a part named 'file', not 'upload'.",
        ),
        ({"url": "/v1/batches", "content": b"{}"}, "Content-Type: application/json"),
        ({"url": "/v1/batches", "json": {"input_file_id": "", "endpoint": CHAT}}, "input_file_id: is empty"),
        ({"url": "/v1/batches", "json": {"input_file_id": "file-x", "endpoint": CHAT}}, "is missing: write 24h"),
        ({"url": "/v1/uploads", "json": {**UPLOAD, "expires_afterr": 1}}, "did you mean 'expires_after'?"),
        ({"url": "/chat/completions", "json": {}}, "Did you mean /v1/chat/completions?"),
        ({"url": "/v1/v1/batches", "json": {}}, "Did you mean /v1/batches?"),
    ],
)
def test_what_is_wrong_is_said_in_words(url: str, call: dict[str, Any], words: str) -> None:
    found = httpx.post(url + call["url"], **{name: value for name, value in call.items() if name != "url"})
    assert found.status_code in (400, 404)
    assert words in found.text
    assert found.headers.get_list("x-content-type-options") == ["nosniff"]


def test_a_download_has_the_name_of_its_file(client: openai.OpenAI) -> None:
    file = client.files.create(file=('a "b"\r\nX: ü.jsonl', BytesIO(b"{}\n")), purpose="batch")
    found = client.files.with_raw_response.content(file.id)
    disposition = found.headers["content-disposition"]
    assert disposition.startswith('attachment; filename="a _22b_22_0D')  # the client escapes what a form cannot hold
    assert "%C3%BC.jsonl" in disposition
