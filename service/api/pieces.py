"""Parses what a connection sends in pieces, so that no client holds the event loop with a body in tiny chunks.

uvicorn hands h11 all that one read brought, up to 256 KiB. Chunks of one byte make that 43,000 events, which take
seconds, and none of them counts towards a limit before it is parsed.
"""

import asyncio
from collections import deque
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 4 * 1024  # of a head or a chunked body, parsed at once: some 700 of the smallest chunks
BODY_BYTES = 64 * 1024  # of a body whose length is known


class _Flow(FlowControl):
    """uvicorn's, but what is left of the last read is parsed before more is read."""

    def __init__(self, protocol: "PiecewiseProtocol", transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._protocol.parse_rest()


class PiecewiseProtocol(H11Protocol):
    """An H11Protocol that parses in pieces; all chunked bodies together have one in a turn of the loop."""

    turns: ClassVar[deque["PiecewiseProtocol"]] = deque()  # chunked bodies that wait for theirs; the first has it next

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rest = bytearray()  # read and not parsed
        self._waits = False  # for its turn
        self.flow = _Flow(self, transport)

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._rest and not self._is_chunked:
            most = self._most
            self.take(data[:most])
            data = data[most:]
        if data and not self.transport.is_closing():
            self.transport.pause_reading()
            self._rest += data
            self.parse_rest()

    def take(self, data: bytes) -> None:
        """Parse a piece."""
        super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.parse_rest()

    def parse_rest(self) -> None:
        """Parse what is left of the last read as soon as it is this connection's turn, then read more."""
        if self._waits or self.transport.is_closing():
            return
        if not self._rest:
            if not self.flow.read_paused:
                self.transport.resume_reading()
            return
        self._waits = True
        if not self._is_chunked:
            self.loop.call_soon(self._parse_piece)
            return
        self.turns.append(self)
        if len(self.turns) == 1:
            self.loop.call_soon(self._next_turn)

    def _parse_piece(self) -> None:
        self._waits = False
        # What comes after a whole request waits for its response; after the last one nothing is read.
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        if self.transport.is_closing() or self.flow.read_paused or is_whole:
            return
        most = self._most
        piece = bytes(self._rest[:most])
        del self._rest[:most]
        try:
            self.take(piece)
        except BaseException:
            self.transport.abort()
            raise
        self.parse_rest()

    def _next_turn(self) -> None:
        try:
            self._parse_piece()
        finally:
            self.turns.popleft()
            if self.turns:
                self.loop.call_soon(self.turns[0]._next_turn)

    @property
    def _is_chunked(self) -> bool:
        """Whether a chunked body is coming. `headers` are those of the request."""
        headers: list[Any] = getattr(self, "headers", None) or []
        return self.conn.their_state is h11.SEND_BODY and any(name == b"transfer-encoding" for name, _ in headers)

    @property
    def _most(self) -> int:
        has_length = self.conn.their_state is h11.SEND_BODY and not self._is_chunked
        return BODY_BYTES if has_length else HEAD_BYTES
