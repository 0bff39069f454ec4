"""An engine behind a URL that does what a test says: a real socket, raw bytes, no library in between."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

END = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    """One event of a stream."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def said(*texts: str, reason: str = "stop", usage: dict | None = None) -> list[bytes]:
    """The events of a whole completion."""
    pieces = [event(choices=[{"index": 0, "text": text}]) for text in texts]
    pieces.append(event(choices=[{"index": 0, "text": "", "finish_reason": reason}]))
    return [*pieces, *([event(choices=[], usage=usage)] if usage else []), END]


def chatted(*deltas: dict, reason: str = "stop") -> list[bytes]:
    """The events of a whole chat."""
    pieces = [event(choices=[{"index": 0, "delta": delta}]) for delta in deltas]
    return [*pieces, event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}]), END]


@dataclass
class Reply:
    """What the engine does with one request."""

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ends: str = "close"  # close, abort (in the middle, as a crash does) or hang (until the client goes)


@dataclass
class Engine:
    """A running engine: replies in turn, the last for ever; what it was asked; how many clients hung up."""

    replies: list[Reply]
    owner: str = ""
    url: str = ""
    asked: list[dict] = field(default_factory=list)
    num_gone: int = 0
    gone: threading.Event = field(default_factory=threading.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next((int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        path = head.split()[1]
        if path == "/v1/models":
            listed = json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}).encode()
            await self._send(writer, Reply([listed]))
        else:
            self.asked.append(body | {"path": path, "head": head})
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            await self._send(writer, reply)
            if reply.ends == "hang":
                await reader.read()
                self.num_gone += 1
                self.gone.set()
            elif reply.ends == "abort":
                writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        headers = {"Connection": "close", "Content-Type": "text/event-stream"} | reply.headers
        lines = [f"HTTP/1.1 {reply.status} X", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        for piece in reply.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)


@contextmanager
def engine(*replies: Reply | list[bytes], owner: str = "") -> Iterator[Engine]:
    """A scripted engine in a thread of its own."""
    made = Engine([one if isinstance(one, Reply) else Reply(one) for one in replies], owner)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    call: Callable = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(20)  # noqa: E731
    server = call(asyncio.start_server(made.serve, "127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:

        async def stop() -> None:
            server.close()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(tasks)  # each ends when its client is gone
            await asyncio.sleep(0.01)  # transports close in the next turn of the loop

        call(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
