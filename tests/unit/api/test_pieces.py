"""What connections send is parsed in pieces, by uvicorn over real sockets."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import pytest
import uvicorn

from service.api.pieces import BODY_BYTES, HEAD_BYTES, PiecewiseProtocol

CHUNKS = b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"


async def count(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the number of bytes of the body; to /early without reading it."""
    size, more = 0, scope["path"] != "/early"
    while more:
        event = await receive()
        size, more = size + len(event.get("body", b"")), event.get("more_body", False)
    body = b"%d\n" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[int, list[tuple[int, int]]], None]:
    """Yield the port, and the bytes of each piece that was parsed, with the number of the loop's turn."""
    parsed, turn = list[tuple[int, int]](), 0

    class Watched(PiecewiseProtocol):
        turns: ClassVar[deque[PiecewiseProtocol]] = deque()

        def take(self, data: bytes) -> None:
            parsed.append((turn, len(data)))
            super().take(data)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    config = uvicorn.Config(count, port=0, http=Watched, log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    running, counting = asyncio.create_task(server.serve()), asyncio.create_task(count_turns())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], parsed
    finally:
        server.should_exit = True
        await running
        counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting


async def answers(port: int, sent: bytes, responses: int = 1) -> list[int]:
    """Send this on one connection; return the numbers in the responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[int] = []
    async with asyncio.timeout(120):
        writer.write(sent)
        for _ in range(responses):
            await reader.readuntil(b"\r\n\r\n")
            found.append(int(await reader.readline()))
        writer.close()
        await writer.wait_closed()
    return found


async def test_tiny_chunks_of_all_connections_together_have_one_piece_in_a_turn() -> None:
    async with served() as (port, parsed):
        found = await asyncio.gather(
            *(answers(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS) for _ in range(4))
        )
    assert found == [[20_000]] * 4
    assert max(size for _, size in parsed) <= HEAD_BYTES
    # A turn is counted before or after the piece that it parses, so two pieces may have one number; and the first piece
    # of each connection comes as it is read.
    assert max(Counter(turn for turn, _ in parsed).values()) <= 2 + 4
    assert len({turn for turn, _ in parsed}) >= len(parsed) // 2 - 4


async def test_a_body_of_a_known_length_comes_in_large_pieces_and_waits_for_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(PiecewiseProtocol, "_next_turn")
    body = bytes(1_000_000)
    async with served() as (port, parsed):
        assert await answers(port, HEAD + b"Content-Length: 1000000\r\n\r\n" + body) == [1_000_000]
    assert max(size for _, size in parsed) <= BODY_BYTES
    assert len(parsed) < 100


@pytest.mark.parametrize("path", [b"/", b"/early"])
async def test_requests_that_come_together_are_answered_in_turn(path: bytes) -> None:
    first = HEAD.replace(b" / ", b" %b " % path) + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS
    second = HEAD + b"Content-Length: 3\r\n\r\nabc"
    async with served() as (port, parsed):
        found = await answers(port, first + second + first + second, 4)
    assert found == [20_000 if path == b"/" else 0, 3] * 2
    assert max(size for _, size in parsed) <= BODY_BYTES
