"""How fast a client must read its response. A socket's buffers would hide how much of it was read."""

from typing import Any

import pytest

from service.api.connections import READ_BYTES, PatientProtocol


class Transport:
    """Holds bytes of a response that nobody has read."""

    def __init__(self, held: int) -> None:
        self.held, self.is_cut = held, False

    def get_write_buffer_size(self) -> int:
        return self.held

    def abort(self) -> None:
        self.is_cut = True


class Loop:
    def __init__(self) -> None:
        self.timers = 0

    def call_later(self, *_: Any) -> None:
        self.timers += 1


@pytest.mark.parametrize(("read", "is_cut"), [(0, True), (1, True), (READ_BYTES - 1, True), (READ_BYTES, False)])
def test_a_client_that_reads_too_slowly_is_cut(read: int, is_cut: bool) -> None:
    protocol: Any = PatientProtocol.__new__(PatientProtocol)
    protocol.transport, protocol.loop = Transport(10 * READ_BYTES), Loop()
    protocol._await_reads()
    protocol.transport.held -= read
    protocol._look_at_reads(10 * READ_BYTES)
    assert protocol.transport.is_cut == is_cut
    assert protocol.loop.timers == (1 if is_cut else 2)
