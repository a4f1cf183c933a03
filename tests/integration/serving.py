"""The HTTP API over a real socket."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from service.api.connections import served
from service.app import create_app
from service.settings import Settings
from tests.conftest import Clock

CHAT = "/v1/chat/completions"


@contextmanager
def serving(settings: Settings, clock: Clock, port: int = 0) -> Generator[tuple[int, uvicorn.Server], None, None]:
    """Its port and the server itself, until the end of the block."""
    config = served(create_app(settings, clock), settings.model_copy(update={"port": port}))
    config.timeout_graceful_shutdown = 1  # of open streams
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the API did not start"
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serve(settings: Settings, clock: Clock, port: int = 0) -> Generator[str, None, None]:
    """Its URL, until the end of the block."""
    with serving(settings, clock, port) as (bound, _):
        yield f"http://127.0.0.1:{bound}"
