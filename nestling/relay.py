"""A runtime whose members are other engines: one thinks, another answers, under the same policies and events.

Call one continues the prompt until the closing tag or the budget; call two continues from the prompt, the thoughts and
the closing tag. Whatever runs behind a URL may be a cluster: this is how Nestling goes past one machine.

Decided here: hand-over is by `prefill` only, for a state cannot be taken from another engine; there are no logprobs,
for each engine has them differently; what has been generated goes on as text, so an engine that reads a text as other
tokens than it wrote continues from those. Prompts come from the model's own template where it is to be had: from a
folder, from llama.cpp and Nestling, which tell it, from vLLM, which applies it. Elsewhere both calls are chats, and
call two sends the thoughts as an answer that has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from nestling.engine.stream import AnswerStream, Outlet
from nestling.policy import PREFILL
from nestling.relay_answer import Answer
from nestling.request import Full, Request
from nestling.template import Template
from nestling.think import Tags
from nestling.upstream import Broken, Upstream, UpstreamSettings, parse_url

T = TypeVar("T")
USUAL = Tags(open="<think>", close="</think>", tool_open="<tool_call>", tool_close="</tool_call>")


class Relay:
    """Answers requests with engines behind URLs; see request.Runtime. `think` and `answer` are the names of the members
    that do so where a request does not say."""

    handovers = (PREFILL,)

    def __init__(
        self,
        think: str,
        answer: str,
        *,
        settings: UpstreamSettings | None = None,
        template: Template | None = None,
        max_running: int = 256,
    ) -> None:
        """think, answer: URL[#model]. template: instead of the one that the answering engine tells."""
        self.settings = settings or UpstreamSettings()
        self.max_running = max_running
        places = {"think": parse_url(think), "answer": parse_url(answer)}
        self.think, self.answer = _names(places)
        self._upstreams = {
            name: Upstream(url, model, self.settings)
            for name, (url, model) in ((self.answer, places["answer"]), (self.think, places["think"]))
        }
        self._tasks: dict[Outlet, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nestling-relay", daemon=True)
        self._thread.start()
        try:
            self._run(self._open())
            told = template or self._run(self._upstreams[self.answer].template())
        except BaseException:
            self.close()
            raise
        self.has_template = told is not None
        # Without one the prompt is not ours to write: messages go on as they are.
        self.template = told or Template("-", tags=USUAL)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def members(self) -> tuple[str, ...]:
        """The engines' names, the answering one first."""
        return tuple(self._upstreams)

    def submit(self, request: Request) -> AnswerStream:
        """Begin an answer; see request.Runtime."""
        policy = request.policy
        policy.check(self.members)
        policy.reserve(request.max_tokens)
        request.sampling.check()
        if policy.handover != PREFILL:
            raise ValueError(f"handover '{policy.handover}' needs both members in one engine. Over URLs: {PREFILL}.")
        if request.logprobs is not None:
            raise ValueError("logprobs: there are none over URLs.")
        if not isinstance(request.prompt, str) and not request.is_plain:
            raise ValueError("a prompt of token ids can only be continued plainly over URLs. Send text.")
        outlet = Outlet()
        with self._lock:
            if self._is_closed or len(self._tasks) >= self.max_running:
                raise Full(f"{len(self._tasks)} answers are under way, no more are admitted. Try again later.")
            answer = Answer(
                request,
                outlet.put,
                upstreams=self._upstreams,
                think=request.policy.think or self.think,
                answer=request.policy.answer or self.answer,
                tags=Tags() if request.is_plain else self.template.tags,
                has_template=self.has_template,
            )
            # Made here, so that a cancellation finds it, and started there.
            self._tasks[outlet] = self._run(self._make(answer, outlet))
        return AnswerStream(outlet, self._cancel)

    def close(self) -> None:
        """Cancel everything and close all connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            outlets = list(self._tasks)
        for outlet in outlets:
            self._cancel(outlet)
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _make(self, answer: Answer, outlet: Outlet) -> asyncio.Task[None]:
        def end(_: asyncio.Task[None]) -> None:
            self._tasks.pop(outlet, None)
            answer.cancelled()  # perhaps before its first step

        task = asyncio.create_task(answer.run())
        task.add_done_callback(end)
        return task

    def _cancel(self, outlet: Outlet) -> None:
        task = self._tasks.get(outlet)
        if task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing to cancel
                self._loop.call_soon_threadsafe(task.cancel)

    async def _open(self) -> None:
        try:
            await asyncio.gather(*(upstream.open() for upstream in self._upstreams.values()))
        except Broken as error:
            raise ValueError(str(error)) from None

    async def _shut(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(upstream.close() for upstream in self._upstreams.values()))
        await self._loop.shutdown_asyncgens()


def _names(places: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Names for the thinking and the answering engine: their models', where those tell them apart."""
    think, answer = places["think"], places["answer"]
    if think == answer:
        name = think[1] or "answer"
        return name, name
    if think[1] and answer[1] and think[1] != answer[1]:
        return think[1], answer[1]
    return "think", "answer"
