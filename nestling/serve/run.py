"""A server process: it listens, says where, and when it is told to stop lets running answers end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from nestling.serve.app import App, Servable, make_app
from nestling.serve.settings import ServeSettings

STOPPING = "the server is shutting down; the answer ends here."


def run(settings: ServeSettings, *, nest: str, runtime: Servable, say: Callable[[str], None] = print) -> None:
    """Serve until the process is told to stop (SIGTERM or SIGINT); the runtime is closed then. nest: its name."""
    try:
        settings.check()
        app = make_app(runtime, settings, nest=nest)
        listener = listen(settings)
        if not (settings.is_loopback or settings.api_key):
            print(
                f"warning: {settings.host} can be reached from other machines, anyone there may use it: set --api-key.",
                file=sys.stderr,
            )
        line = f"serving {app.models.name} ({', '.join(runtime.members)}) at {address(listener)}"
        Server(app, settings, ready=lambda: say(line)).run([listener])
    finally:
        runtime.close()


def listen(settings: ServeSettings) -> socket.socket:
    """The socket that is listened on; a port that is taken is an error of whoever asked for it."""
    try:
        found = socket.getaddrinfo(settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
    except OSError as error:
        raise ValueError(f"cannot listen on {settings.host}: {error.strerror or error}.") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(place)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}.") from error
    return listener


def address(listener: socket.socket) -> str:
    """Where a browser finds the server."""
    host, port = map(str, listener.getsockname()[:2])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn that tells running answers when it stops."""

    def __init__(self, app: App, settings: ServeSettings, *, ready: Callable[[], object] = lambda: None) -> None:
        self.app, self.grace, self.ready = app, settings.grace, ready
        super().__init__(
            uvicorn.Config(
                app.guard,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(settings.grace) + 10,  # after it, whatever is left is cut
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server. Only now a client is heard, and a signal stops the server as it should."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Not handed on afterwards as uvicorn does: stopping when told is success."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """Take no more requests, and end when running answers have ended or their time is over. From any thread."""
        self.app.guard.is_closing = True
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self.grace, self.app.hall.stop, STOPPING)
