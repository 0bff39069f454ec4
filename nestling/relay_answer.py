"""One answer by engines behind URLs: the think machine is asked what to do, and an engine called, in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nestling.events import (
    ANSWERING,
    CANCELLED,
    LENGTH,
    STOP,
    THINKING,
    TOOL_CALL,
    Ended,
    Event,
    Failed,
    Finished,
    Started,
    Text,
)
from nestling.policy import PREFILL, Policy
from nestling.request import Request
from nestling.template import NO_THINKING
from nestling.think import Action, Done, Force, Machine, Say, Switch, Tags
from nestling.upstream import Broken, Call, Piece, Upstream


@dataclass
class Answer:
    """One answer on its way: the machine is asked, and an engine called, in turn."""

    request: Request
    put: Callable[[Event], None]
    upstreams: Mapping[str, Upstream] = field(kw_only=True)
    think: str = field(kw_only=True)  # the member that thinks
    answer: str = field(kw_only=True)
    tags: Tags = field(kw_only=True)
    has_template: bool = field(kw_only=True)  # the prompt is the model's; otherwise the messages are all there is
    machine: Machine = field(init=False)
    context: str = ""  # all that was generated or forced, tags included
    phase: str = ANSWERING
    is_told: bool = False  # Started was sent
    is_over: bool = False
    begun: float = 0.0
    first: float | None = None  # when the phase's first token was there
    before: str = ""  # the member of the phase before
    num_before: int = 0  # tokens before the phase
    num_prefilled: int = 0
    num_reasoning: int = 0
    num_prompt: int = 0
    is_forced: bool = False
    is_parsed: bool = False  # the engine tells thoughts apart from the answer
    stop: str = ""

    async def run(self) -> None:
        """All events of the answer; raises nothing but its own cancellation."""
        try:
            await self._answer()
        except Broken as error:
            self._fail(str(error), error.status)
        except ValueError as error:
            self._fail(str(error), 400)
        except Exception as error:  # whoever waits for the answer must hear of it
            self._fail(f"the relay failed: {type(error).__name__}: {error}", 500)

    def cancelled(self) -> None:
        """The last event, if there was none."""
        if not self.is_over:
            self._finish(CANCELLED)

    @property
    def member(self) -> str:
        """Who generates in this phase."""
        return self.think if self.phase == THINKING else self.answer

    async def _answer(self) -> None:
        request, tags = self.request, self.tags
        self.begun = time.perf_counter()
        prompt: str | tuple[int, ...] | None = request.prompt
        if request.messages and not self.has_template:
            prompt = await self.upstreams[self.think].prompt(request.messages)
        policy = Policy() if request.is_plain else request.policy
        if prompt is None:  # a chat: its thoughts come first, whether the template or the model opens them
            is_open = policy.thinking_token_budget != 0
        else:
            is_open = bool(tags.open) and isinstance(prompt, str) and prompt.rstrip().endswith(tags.open)
        measure = await self._measure(policy)
        self.machine = Machine(policy, tags=tags, max_tokens=request.max_tokens, is_open=is_open, measure=measure)
        self.phase = self.machine.phase
        if self.phase == THINKING:
            self._tell()
        self._follow(self.machine.begin())
        while not self.is_over:
            await self._generate(prompt)

    async def _measure(self, policy: Policy) -> Callable[[str], int]:
        """How many tokens a forced text takes: asked where the engine tells, else guessed on the high side."""
        upstream, tags = self.upstreams[self.member], self.tags
        known: dict[str, int] = {}
        for text in (tags.close, policy.closing + tags.close) if tags.close else ():
            count = await upstream.count(text)
            if count is not None:
                known[text] = count
        is_tag = known.get(tags.close, 1)
        return lambda text: known.get(text, is_tag if text == tags.close else 1 + len(text.encode()) // 3)

    async def _generate(self, prompt: str | tuple[int, ...] | None) -> None:
        """One call: until the engine ends it, or another must go on."""
        request, phase, machine, tags = self.request, self.phase, self.machine, self.tags
        upstream = self.upstreams[self.member]
        call = Call(
            max_tokens=machine.room,
            sampling=request.sampling,
            stop=(tags.close,) if phase == THINKING else request.stop,
            stop_tokens=request.stop_tokens,
            tags=tags,
        )
        if prompt is None:
            is_off = request.policy.thinking_token_budget == 0
            begun = ({"role": "assistant", "content": tags.open + self.context},) if self.context else ()
            call = replace(
                call,
                messages=(*request.messages, *begun),
                continues=bool(begun),
                options=NO_THINKING if is_off else {},
            )
        elif isinstance(prompt, str):
            call = replace(call, prompt=prompt + self.context)
        else:
            call = replace(call, prompt=prompt)
        num_before, is_thinking = machine.num_tokens, phase == THINKING
        last = Piece()
        # Closed here and now when another goes on: the engine must not work for nobody.
        async with contextlib.aclosing(upstream.stream(call)) as pieces:
            async for piece in pieces:
                if piece.prompt_tokens is not None:
                    self._prompt(piece.prompt_tokens, num_before)
                if piece.completion_tokens is not None:
                    last = replace(last, completion_tokens=piece.completion_tokens)
                if piece.reason:
                    last = replace(last, reason=piece.reason, stop=piece.stop)
                self._take(self._tagged(piece))
                if self.is_over or (self.phase == THINKING) != is_thinking:
                    return
        uncounted = (last.completion_tokens or 0) - (machine.num_tokens - num_before)
        missing = max(0, min(uncounted, machine.room))  # whatever an engine says of its tokens
        self._end(last, missing)

    def _tagged(self, piece: Piece) -> str:
        """A piece's text with the tags that the engine took out of it. What the thinking engine goes on to answer is
        dropped: the answer is another call's."""
        is_thinking, tags = self.machine.phase == THINKING, self.tags
        self.is_parsed = self.is_parsed or bool(piece.thoughts)
        if not piece.thoughts:
            return tags.close if is_thinking and self.is_parsed and piece.text else piece.text
        opening = "" if is_thinking else tags.open
        return opening + piece.thoughts + (tags.close if piece.text else "")

    def _take(self, text: str) -> None:
        if not text:
            return
        if self.first is None:
            self.first = time.perf_counter()
        self.context += text
        self._follow(self.machine.take(text))

    def _end(self, last: Piece, missing: int) -> None:
        """The engine ended its answer."""
        machine, tags = self.machine, self.tags
        if last.reason == LENGTH:
            self._follow(machine.take("", count=max(missing, machine.room)))
        elif self.phase == THINKING:  # at the closing tag, which engines cut off, or before it: it ends here in both
            self.context += tags.close
            self._follow(machine.take(tags.close, count=max(1, missing)))
        else:
            self.stop = last.stop if last.stop in self.request.stop else ""
            self._follow(machine.stop(count=missing))

    def _follow(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._tell()
                self.put(Text(phase=action.phase, text=action.text))
            elif isinstance(action, Force):
                self.context += action.text
                self.is_forced = True
            elif isinstance(action, Switch):
                self._switch(action.phase)
            elif isinstance(action, Done):
                for rest in self.machine.end():
                    self._tell()
                    self.put(Text(phase=rest.phase, text=rest.text))
                self._finish(action.reason)

    def _switch(self, phase: str) -> None:
        before = self.member
        self._close()
        self.phase, self.before = phase, before
        self.begun, self.first, self.is_told, self.is_forced = time.perf_counter(), None, False, False
        self.num_before, self.num_prefilled = self.machine.num_tokens, 0
        if phase in (THINKING, TOOL_CALL):
            self._tell()

    def _tell(self) -> None:
        if not self.is_told:
            self.is_told = True
            self.put(Started(phase=self.phase, member=self.member))

    def _close(self) -> None:
        num_tokens = self.machine.num_tokens - self.num_before
        if self.phase == THINKING:
            self.num_reasoning += num_tokens
        if not self.is_told:
            return
        now, is_handed = time.perf_counter(), bool(self.before) and self.before != self.member
        self.put(
            Ended(
                phase=self.phase,
                member=self.member,
                num_tokens=num_tokens,
                seconds=now - self.begun,
                num_prefilled=self.num_prefilled,
                handover=PREFILL if is_handed else "",
                handover_seconds=(self.first or now) - self.begun if is_handed else 0.0,
                is_forced=self.is_forced,
            )
        )

    def _prompt(self, num_tokens: int, num_generated: int) -> None:
        """The engine says how long its prompt was."""
        self.num_prefilled = num_tokens
        self.num_prompt = self.num_prompt or max(0, num_tokens - num_generated)

    def _finish(self, reason: str) -> None:
        self.is_over = True
        num_tokens = self.machine.num_tokens if hasattr(self, "machine") else 0
        if hasattr(self, "machine"):
            self._tell()
            self._close()
        self.put(
            Finished(
                reason=reason,
                prompt_tokens=self.num_prompt,
                completion_tokens=num_tokens,
                reasoning_tokens=self.num_reasoning,
                stop=self.stop if reason == STOP else "",
            )
        )

    def _fail(self, message: str, status: int) -> None:
        if not self.is_over:
            self.is_over = True
            self.put(Failed(message=message, status=status))
