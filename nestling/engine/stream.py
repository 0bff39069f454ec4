"""The way of an answer's events from the engine's thread to whoever asked: read in a thread or in an event loop.

The engine never waits for a reader: events are kept until they are read, and `max_tokens` bounds how many there can
be. A stream that nobody holds any more cancels its answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from nestling.events import Event, Failed, Finished


class Outlet:
    """The engine's end: events go in."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], object] | None = None

    def put(self, event: Event) -> None:
        """Hand an event over; never waits."""
        with self._changed:
            self._events.append(event)
            self._changed.notify()
            wake = self._wake
        if wake is not None:
            wake()

    def take(self, *, is_patient: bool) -> Event | None:
        """The next event; without patience None if there is none yet."""
        with self._changed:
            while is_patient and not self._events:
                self._changed.wait()
            return self._events.popleft() if self._events else None

    def on_event(self, wake: Callable[[], object] | None) -> None:
        """Call `wake` after each event from now on."""
        with self._changed:
            self._wake = wake


class AnswerStream:
    """The reader's end; see request.Stream."""

    def __init__(self, outlet: Outlet, cancel: Callable[[Outlet], None]) -> None:
        self._outlet, self._cancel, self._is_over = outlet, cancel, False

    def __iter__(self) -> Iterator[Event]:
        while not self._is_over:
            event = self._outlet.take(is_patient=True)
            assert event is not None
            self._is_over = isinstance(event, Finished | Failed)
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, has_event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(has_event.set)

        self._outlet.on_event(wake)
        try:
            while not self._is_over:
                has_event.clear()
                event = self._outlet.take(is_patient=False)
                if event is None:
                    await has_event.wait()
                    continue
                self._is_over = isinstance(event, Finished | Failed)
                yield event
        finally:
            self._outlet.on_event(None)

    def cancel(self) -> None:
        """Stop the work; the stream ends with Finished("cancelled"). From any thread."""
        self._cancel(self._outlet)

    def __del__(self) -> None:
        if not self._is_over:
            self._cancel(self._outlet)
