"""An engine's first rank listens where nobody else can take its place."""

import socket
from datetime import timedelta

import pytest

pytest.importorskip("sglang")

from engine_ext.plugin.scheduler.loopback import on_loopback


def test_a_rank_that_is_alone_starts_though_its_port_was_taken_since() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = on_loopback(not_called, "127.0.0.1", taken.getsockname()[1], 0, 1, timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"


def not_called(*_: object) -> None:
    raise AssertionError("torch's own store listens on all interfaces")
