"""The HTTP API over a real socket."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from service.app import create_app
from service.settings import Settings
from tests.conftest import Clock

CHAT = "/v1/chat/completions"


@contextmanager
def serve(settings: Settings, clock: Clock, port: int = 0) -> Generator[str, None, None]:
    """Its URL, until the end of the block."""
    app = create_app(settings, clock)
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, log_config=None, http="h11", timeout_graceful_shutdown=1)  # of open streams
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the API did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
