"""Bytes that no client would send: every answer is 4xx, memory stays, and the service goes on."""

import socket
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.server import Role
from tests.waiting import LIMIT_S

MIB = 1024 * 1024
# The API's process is watched over all examples of a test, which is what is meant.
WATCHED = settings(max_examples=40, deadline=None, suppress_health_check=(HealthCheck.function_scoped_fixture,))
GROWTH = 48 * MIB

METHODS = st.sampled_from([b"GET", b"POST", b"DELETE", b"PUT", b"BREW", b"\x00"])
PATHS = st.sampled_from(
    [b"/v1/files", b"/v1/batches", b"/v1/uploads/upload_x/parts", b"/v1/files/file-x/content", b"/v1/webhook_endpoints"]
)
TARGETS = PATHS | st.binary(max_size=60)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"Range", b"Content-Type", b"Content-Length", b"If-None-Match", b"Transfer-Encoding"])
        | st.binary(max_size=20),
        st.binary(max_size=80),
    ),
    max_size=6,
)
DISPOSITION = b"Content-Disposition: form-data; name="
PIECES = st.sampled_from(
    [
        b"--xyz\r\n",
        b"--xyz--\r\n",
        b"\r\n",
        b"\r\n\r\n",
        DISPOSITION + b'"file"; filename="f"\r\n',
        DISPOSITION + b'"purpose"\r\n',
        b"batch",
        b"Content-Type: ",
        b'name="',
        b"\xff\x00",
    ]
)


def speak(api: Role, sent: bytes) -> bytes:
    """What comes back until the API closes the connection, or has nothing to say for a moment."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(sent)
            with suppress(OSError):  # "not connected", if the API has cut the connection already
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            return b""


def is_fair(answer: bytes) -> bool:
    """Nothing, or a status that is neither an error of the service nor one that clients try again."""
    if not answer:
        return True
    status = int(answer.split(b" ", 2)[1])
    return status < 500 and status not in (408, 409, 429) and b"Traceback" not in answer


@WATCHED
@given(METHODS, TARGETS, HEADERS, st.binary(max_size=400))
def test_any_request_gets_a_fair_answer(
    api: Role, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    lines = [b"%s %s HTTP/1.1" % (method, target), b"Host: 127.0.0.1", *(b"%s: %s" % each for each in headers)]
    assert is_fair(speak(api, b"\r\n".join(lines) + b"\r\n\r\n" + body))


@WATCHED
@given(st.lists(PIECES | st.binary(max_size=50), max_size=30))
def test_any_form_gets_a_fair_answer(api: Role, pieces: list[bytes]) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    for path in ("files", "uploads/upload_x/parts"):
        answer = httpx.post(f"{api.url}/v1/{path}", content=b"".join(pieces), headers=headers)
        assert answer.status_code in (200, 400, 404, 413)


@WATCHED
@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_body_where_json_is_wanted(api: Role, body: bytes) -> None:
    for path in ("batches", "uploads", "webhook_endpoints", "uploads/upload_x/complete"):
        answer = httpx.post(f"{api.url}/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 404)


HEAD = b"GET /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
FORM = (
    b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    b"Content-Length: 99999999\r\n\r\n--x\r\n"
)
FIELD = DISPOSITION + b'"a"\r\n\r\n'
FLOODS: dict[str, Callable[[], bytes]] = {
    "many headers": lambda: HEAD + b"X-A: b\r\n" * 500_000 + b"\r\n",
    "one long header": lambda: HEAD + b"X-A: " + b"b" * (64 * MIB) + b"\r\n\r\n",
    "a long target": lambda: b"GET /v1/files?after=" + b"a" * (64 * MIB) + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a nesting bomb": lambda: POST + b"Content-Length: 900000\r\n\r\n" + b"[" * 900_000,
    "a long body": lambda: POST + b"Content-Length: 999999999\r\n\r\n" + b" " * (64 * MIB),
    "tiny chunks": lambda: POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000,
    "a long chunk size": lambda: POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * (16 * MIB),
    "many parts": lambda: FORM + (FIELD + b"b\r\n--x\r\n") * 200_000,
    "a long name": lambda: FORM + DISPOSITION + b'"' + b"a" * (32 * MIB),
    "a long field": lambda: FORM + FIELD + b"b" * (32 * MIB),
    "many part headers": lambda: FORM + b"X-A: b\r\n" * 1_000_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_leaves_memory_alone(api: Role, name: str) -> None:
    httpx.get(f"{api.url}/v1/files")
    api.forget_peak()
    before = api.peak_rss
    answer = speak(api, FLOODS[name]())
    assert is_fair(answer)
    assert not answer.startswith(b"HTTP/1.1 2")
    assert api.peak_rss - before < GROWTH
    assert httpx.get(f"{api.url}/v1/files").status_code == 200
