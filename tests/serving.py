"""A real server on a real socket for tests, and ways to talk to it that no client library allows."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.request import Runtime
from nestling.serve.app import App, make_app
from nestling.serve.run import Server, address, listen
from nestling.serve.settings import ServeSettings

NEST = Path(__file__).parents[1] / "nestling" / "assets" / "nest"
QUESTIONS = ("7+8+7", "bits 6625", "gcd 15,85", "caesar 14:S", "35*58", "legs 8 bird,8 chicken")


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    app: App
    server: Server
    runtime: Runtime

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def served(runtime: Runtime, **changes: Any) -> Iterator[Served]:
    """A server in a thread of its own, stopped at the end; the runtime stays."""
    settings = ServeSettings(**{"port": 0, "name": "nest", "grace": 0.2} | changes)
    listener = listen(settings)
    app = make_app(runtime, settings, nest="nest")
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(address(listener), app, server, runtime)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        listener.close()


def wait_until(is_true: Any, seconds: float = 20.0) -> None:
    """Until something holds; an error if it never does."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def raw_request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def talk(place: tuple[str, int], sent: bytes, *, seconds: float = 30.0) -> tuple[int, bytes]:
    """Send bytes, read until the server closes or the answer is whole; the status and the body."""
    with socket.create_connection(place, timeout=seconds) as peer:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(sent)
        answer = peer.makefile("rb")
        status = int(answer.readline().split()[1])
        headers = {}
        while line := answer.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return status, answer.read(int(headers["content-length"])) if "content-length" in headers else answer.read()


def question(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "nest", "messages": [{"role": "user", "content": text}], "max_tokens": 200} | fields


def chunks(body: bytes) -> list[dict[str, Any]]:
    """The pieces of a stream, without its end mark."""
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
