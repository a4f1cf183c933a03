"""Forms arrive in any cut, and are bounded."""

from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.multipart import MAX_FIELD_BYTES, Form, FormReader
from service.errors import BadRequest, PayloadTooLarge

TYPE = "multipart/form-data; boundary=xyz"


def form(content: bytes, purpose: bytes = b"batch") -> bytes:
    return (
        b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose + b"\r\n"
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n" + content + b"\r\n--xyz--\r\n"
    )


async def read(data: bytes, cut: int, max_file_bytes: int = 1000) -> tuple[Form, bytes]:
    sunk: list[bytes] = []

    async def sink(part: bytes) -> None:
        sunk.append(part)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), cut):
            yield data[at : at + cut]

    return await FormReader(TYPE, max_file_bytes, fields=("purpose",)).read(chunks(), sink), b"".join(sunk)


@given(st.binary(max_size=300).filter(lambda data: b"\r\n--xyz" not in data), st.integers(1, 64))
async def test_file_arrives_whole_in_any_cut(content: bytes, cut: int) -> None:
    found, sunk = await read(form(content), cut)
    assert sunk == content
    assert found == Form({"purpose": "batch"}, "in.jsonl", len(content))


async def test_large_file_is_refused_with_its_code() -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        await read(form(b"x" * 1001), 100)
    assert caught.value.code == "file_too_large"


@pytest.mark.parametrize(
    "data",
    [
        form(b"x")[:-9],
        b"nothing like a form",
        form(b"x", purpose=b"p" * (MAX_FIELD_BYTES + 1)),
        b"--xyz\r\n" + b"H" * 20_000 + b": x\r\n\r\n\r\n--xyz--\r\n",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 100 + b"--xyz--\r\n",
        form(b"x").replace(b"--xyz--", b'--xyz\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n--xyz--'),
    ],
    ids=["cut off", "no form", "long field", "long header", "many parts", "two files"],
)
async def test_malformed_form_is_a_bad_request(data: bytes) -> None:
    with pytest.raises(BadRequest):
        await read(data, 4096)


@given(st.binary(max_size=400))
async def test_any_bytes_are_a_form_or_a_bad_request(data: bytes) -> None:
    with suppress(BadRequest, PayloadTooLarge):
        found, sunk = await read(b"--xyz\r\n" + data, 7)
        assert found.size_bytes == len(sunk)


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_other_content_types_are_refused(content_type: str) -> None:
    with pytest.raises(BadRequest, match="multipart/form-data"):
        FormReader(content_type, 10)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b'name="expires_after"', "Unknown field 'expires_after': the fields are purpose, file."),
        (b'name="upload"; filename="in.jsonl"', "The file must be in a part named 'file', not 'upload'."),
        (b'name="purpose"', "The form has the field 'purpose' twice."),
    ],
)
async def test_what_would_be_ignored_is_refused(part: bytes, words: str) -> None:
    more = b"--xyz\r\nContent-Disposition: form-data; " + part + b"\r\n\r\nx\r\n--xyz--\r\n"
    with pytest.raises(BadRequest) as caught:
        await read(form(b"x").removesuffix(b"--xyz--\r\n") + more, 7)
    assert caught.value.message == words
