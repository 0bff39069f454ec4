"""Answers on their way to a client: events become chunks of a stream, or one body at the end.

Whoever hangs up cancels the work, whatever it is at. Whoever does not read is waited for so long and no longer. When
the server is told to stop, running answers get some time and are then told that they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nestling.events import Ended, Event, Failed, Finished, Text
from nestling.request import Stream
from nestling.serve.metrics import Metrics
from nestling.serve.refusals import error_body, error_response

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects a stream is not what anyone wants
)


class Form(Protocol):
    """How events look to the client: nestling/openai.py."""

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Pieces of a stream for an event of the answer `index`."""
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """Pieces after the ends of all answers."""
        ...

    def body(self) -> dict[str, Any]:
        """Everything at once, after the events of all answers went through `chunks`."""
        ...


class Hall:
    """The answers that are under way in one server."""

    def __init__(self, metrics: Metrics, *, write_timeout: float) -> None:
        self.metrics, self.write_timeout = metrics, write_timeout
        self.deliveries: set[Delivery] = set()

    def stop(self, message: str) -> None:
        """End every answer; its client is told why."""
        for delivery in list(self.deliveries):
            delivery.stop(message)


class Delivery(Response):
    """One or several answers to one request."""

    def __init__(self, hall: Hall, streams: Sequence[Stream], form: Form, *, is_stream: bool, begun: float) -> None:
        super().__init__()
        self.hall, self.streams, self.form, self.is_stream, self.begun = hall, streams, form, is_stream, begun
        self.is_gone = False  # the client hung up
        self.told = ""  # why the answers were stopped
        self._has_begun = self._has_text = False
        self._num_open = len(streams)
        hall.deliveries.add(self)
        hall.metrics.num_live += len(streams)

    def stop(self, message: str) -> None:
        """End the answers; the client is told why."""
        self.told = message
        self._cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._deliver(scope, receive, send)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            self._cancel()
            self.hall.deliveries.discard(self)
            self.hall.metrics.num_live -= len(self.streams)
            for _ in range(self._num_open):
                self.hall.metrics.end("abort", time.perf_counter() - self.begun)

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _each(self.streams)
        try:
            async for index, event in events:
                self._measure(event)
                failed = self._failure(event)
                if failed is not None:
                    await self._fail(failed, scope, receive, send)
                    return
                chunks = self.form.chunks(index, event)
                if self.is_stream and chunks and not self.is_gone:
                    await self._send(send, chunks)
        finally:
            await events.aclose()
        if self.is_gone:
            return
        if self.is_stream:
            await self._send(send, self.form.last_chunks())
            await self._write(send, b"data: [DONE]\n\n", is_last=True)
        else:
            await JSONResponse(self.form.body())(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        """Until the client hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._cancel()

    def _cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    def _failure(self, event: Event) -> Failed | None:
        """What the client is told if this event means that the answer breaks off."""
        if isinstance(event, Failed):
            return event
        if self.told and not self.is_gone and isinstance(event, Finished) and event.reason == "cancelled":
            return Failed(message=self.told, status=503)
        return None

    async def _fail(self, failed: Failed, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_begun:
            await self._send(send, [error_body(failed.status, failed.message)])
            await self._write(send, b"", is_last=True)  # without [DONE]: nobody takes this for a whole answer
        else:
            await error_response(failed.status, failed.message)(scope, receive, send)

    async def _send(self, send: Send, chunks: list[dict[str, Any]]) -> None:
        lines = [f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks]
        await self._write(send, "".join(lines).encode("utf-8"))

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        async with asyncio.timeout(self.hall.write_timeout or None):
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def _measure(self, event: Event) -> None:
        seconds, metrics = time.perf_counter() - self.begun, self.hall.metrics
        if isinstance(event, Text) and not self._has_text:
            self._has_text = True
            metrics.begin(seconds)
        elif isinstance(event, Ended):
            metrics.end_phase(event)
        elif isinstance(event, Finished):
            self._num_open -= 1
            metrics.finish(event, seconds)
        elif isinstance(event, Failed):
            self._num_open -= 1
            metrics.end("error", seconds)


async def _each(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several answers as they come, each with its answer's place."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def read(index: int, stream: Stream) -> None:
        try:
            async for event in stream:
                queue.put_nowait((index, event))
        except Exception as error:  # raised again where it is waited for
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_open -= isinstance(event, Finished | Failed)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
