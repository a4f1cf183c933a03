"""Connections that send nothing: a head must come in ten seconds, a body must move, an address has its share.

uvicorn waits for a request's head, and for its body, as long as anybody likes; a few hundred idle sockets would take
all descriptors of the process.
"""

import asyncio
import resource
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # from the first moment of a connection, or the last answer on it, to the end of the next head
BODY_S = 30.0  # in which so much of a body that is not whole must come
BODY_BYTES = 16 * 1024
READ_S = 60.0  # in which a client must take some of an answer that it is sent
SHARE = 4  # of the descriptors of the process, one part for an address

_by_address: Counter[str] = Counter()


def raise_descriptors() -> None:
    """Use as many descriptors as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_of_one(wanted: int) -> int:
    """Connections that an address may have; 0: no bound, for what stands behind a proxy that has its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, soft // SHARE) if wanted else 0


class PatientProtocol(H11Protocol):
    """H11Protocol that does not wait for ever."""

    most: int = 0  # connections of one address
    _address: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _reads: asyncio.TimerHandle | None = None
    _come: int = 0  # bytes since the timer of a body began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self.most and _by_address[address] >= self.most:
            transport.abort()
            return
        _by_address[address] += 1
        self._address = address
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.resume_writing()
        if self._address is not None:
            _by_address[self._address] -= 1
            if not _by_address[self._address]:
                del _by_address[self._address]
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_head = self.conn.their_state is h11.IDLE
        was_between = was_head and self._timer is None
        super().data_received(data)
        state: Any = self.conn.their_state
        if state is h11.SEND_BODY:
            self._come += len(data)
            if self._timer is None or was_head or self._come >= BODY_BYTES:
                self._expect(BODY_S)
        elif state is not h11.IDLE:
            self._expect(None)
        elif was_between:  # the beginning of another head, on a connection that is kept
            self._expect(HEAD_S)

    def on_response_complete(self) -> None:
        self._expect(None)  # uvicorn closes a connection that is kept for nothing
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client has not taken what it was sent: it must, or it keeps what we hold for it for ever."""
        super().pause_writing()
        if self._reads is None:
            self._await_reads()

    def _await_reads(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._reads = self.loop.call_later(READ_S, self._look_at_reads, waiting)

    def _look_at_reads(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() < waited:
            self._await_reads()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reads is not None:
            self._reads.cancel()
            self._reads = None

    def _expect(self, seconds: float | None) -> None:
        """Close the connection unless something is heard in so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._come = 0
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        # A body that nobody reads is not the sender's fault: the reader is held up, as by a slow store.
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and self.conn.their_state is h11.SEND_BODY and self.flow.read_paused:
            self._expect(BODY_S)
        else:
            self.transport.abort()


def protocol(most: int) -> type[PatientProtocol]:
    return type("PatientProtocol", (PatientProtocol,), {"most": most})
