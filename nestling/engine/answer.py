"""One answer on its way: its tokens, its phases, and the events that tell of them. No model is run here.

The context is the prompt and everything generated or forced since. A member's state has read some of it; what it has
not read yet is what there is to do next: one token is a step of decoding, more are a prefill. So a prompt, a forced
closing sentence and a hand-over to another member are the same thing to the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from nestling.engine.detokenizer import Detokenizer, Stops
from nestling.engine.draw import Drawer, Drawn
from nestling.engine.handover import Trail
from nestling.engine.plain import Plain
from nestling.engine.state import RowState
from nestling.engine.stream import Outlet
from nestling.events import (
    ANSWERING,
    CANCELLED,
    STOP,
    THINKING,
    Ended,
    Failed,
    Finished,
    Started,
    Text,
    Token,
)
from nestling.policy import REPLAY, SHADOW
from nestling.request import Request
from nestling.think import Action, Done, Force, Machine, Say, Switch


@dataclass
class Phase:
    """A phase so far."""

    name: str
    member: str
    begun: float
    handover: str = ""
    first: float | None = None  # when its first token was there
    num_tokens: int = 0
    num_prefilled: int = 0
    num_reused: int = 0
    is_forced: bool = False
    is_told: bool = False  # Started was sent


@dataclass(eq=False)
class Answer:
    """See above. `ids` is the context; `member` generates next, and `state` is that of `holder` after some of `ids`."""

    request: Request
    outlet: Outlet
    ids: list[int]
    machine: Machine | Plain
    tokenizer: Any  # of the library tokenizers
    silent: Collection[int]  # tokens without text
    stop_tokens: Collection[int]
    think: str
    answer: str
    state: RowState | None = None
    holder: str = ""
    tag: int = 0  # tokens of the prompt before the tag that opens the thoughts; all, if there is none
    shadow: RowState | None = None  # of the answering member, while another thinks
    num_shadowed: int = 0  # tokens that it has read there
    is_over: bool = False
    num_completed: int = 0
    num_reasoning: int = 0
    num_cached: int = 0
    num_prompt: int = field(init=False)
    drawer: Drawer = field(init=False)
    phase: Phase = field(init=False)
    _tokens: list[Token] = field(default_factory=list)  # whose text has not been sent

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)
        self.drawer = Drawer(self.request.sampling, logprobs=self.request.logprobs)
        self._stops = Stops(self.request.stop)
        self._text = Detokenizer(self.tokenizer, silent=self.silent, before=self.ids)
        self.phase = Phase(self.machine.phase, self.member_of(self.machine.phase), time.perf_counter())
        is_handed = not self.request.is_plain and self.think != self.answer
        self.is_shadowed = is_handed and self.request.policy.handover == SHADOW
        is_replayed = is_handed and self.request.policy.handover == REPLAY
        self.trail = Trail(self.request.policy.replay) if is_replayed else None

    @property
    def member(self) -> str:
        """The member that generates."""
        return self.phase.member

    @property
    def most_tokens(self) -> int:
        """Tokens that the prompt and all that follows it may come to."""
        return self.num_prompt + self.request.max_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether the next step is one token for the member that holds the state."""
        return self.state is not None and self.holder == self.member and self.num_unread == 1 and self.state.length > 0

    @property
    def num_unread(self) -> int:
        """Tokens of the context that the state has not read."""
        return len(self.ids) - (self.state.length if self.state is not None else 0)

    def member_of(self, phase: str) -> str:
        """Who generates in a phase."""
        return self.think if phase == THINKING else self.answer

    def begin(self) -> None:
        """The answer is admitted: its clock starts."""
        self.phase.begun = time.perf_counter()
        if self.phase.name == THINKING:
            self._tell()
        self._follow(self.machine.begin())

    def accept(self, drawn: Drawn) -> None:
        """One more token was drawn."""
        if self.phase.first is None:
            self.phase.first = time.perf_counter()
        self.num_completed += 1
        self.phase.num_tokens += 1
        if drawn.id in self.stop_tokens:
            self._follow([*self.machine.take(self._text.end(), count=0), *self.machine.stop()])
            return
        self.ids.append(drawn.id)
        text = self._text.add(drawn.id)
        self._tokens.append(self._token(drawn, text))
        self._follow(self.machine.take(text))

    def finish(self, reason: str, *, stop: str = "") -> None:
        """The end: whatever is held back is sent, and the state is given back."""
        if self.is_over:
            return
        if not stop and reason != CANCELLED:
            for said in self.machine.end():
                self._say(said.phase, said.text)
            self._say(self.phase.name, self._text.end())
            if not self.is_over:
                self._put(self.phase.name, self._stops.end())
        if self.is_over:
            return  # a stop string came to light
        if self._tokens and not stop and reason != CANCELLED:  # the last ones had no text
            self._put(self.phase.name, "", is_empty=False)
        self._close_phase()
        self._release()
        self.outlet.put(
            Finished(
                reason=reason,
                prompt_tokens=self.num_prompt,
                completion_tokens=self.num_completed,
                reasoning_tokens=self.num_reasoning,
                cached_tokens=self.num_cached,
                stop=stop,
            )
        )

    def fail(self, message: str, status: int = 500) -> None:
        """The answer breaks off."""
        if not self.is_over:
            self._release()
            self.outlet.put(Failed(message=message, status=status))

    def _release(self) -> None:
        self.is_over = True
        self.state = self.shadow = None

    def _follow(self, actions: list[Action]) -> None:
        for action in actions:
            if self.is_over:
                return
            if isinstance(action, Say):
                self._say(action.phase, action.text)
            elif isinstance(action, Force):
                self._force(action.text)
            elif isinstance(action, Switch):
                self._switch(action.phase)
            else:
                assert isinstance(action, Done)
                self.finish(action.reason)

    def _say(self, phase: str, text: str) -> None:
        if phase == ANSWERING and not self._stops.found:
            text = self._stops.add(text)
        self._put(phase, text)
        if self._stops.found:
            self.finish(STOP, stop=self._stops.found)

    def _put(self, phase: str, text: str, *, is_empty: bool = True) -> None:
        """Send text with the tokens that it came from."""
        if text or not is_empty:
            self._tell()
            self.outlet.put(Text(phase=phase, text=text, tokens=tuple(self._tokens)))
            self._tokens.clear()

    def _force(self, text: str) -> None:
        """Tokens that nobody drew: they join the context."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.ids += tokens
        self.num_completed += len(tokens)
        self.phase.num_tokens += len(tokens)
        self.phase.is_forced = True

    def _switch(self, name: str) -> None:
        before = self.phase
        carried = 0 if before.is_told else before.num_tokens
        self._close_phase(is_whole=False)
        self._tokens.clear()  # of the tag
        self._text = Detokenizer(self.tokenizer, silent=self.silent, before=self.ids)
        member = self.member_of(name)
        self.phase = Phase(
            name,
            member,
            time.perf_counter() if before.is_told else before.begun,
            handover=self.request.policy.handover if member != before.member else "",
            num_tokens=carried,
        )
        self._tell()

    def _tell(self) -> None:
        if not self.phase.is_told:
            self.phase.is_told = True
            self.outlet.put(Started(phase=self.phase.name, member=self.phase.member))

    def _close_phase(self, *, is_whole: bool = True) -> None:
        """is_whole: the answer ends here; a phase in which nothing was said is told all the same."""
        phase, now = self.phase, time.perf_counter()
        if is_whole:
            self._tell()
        if not phase.is_told:
            return
        if phase.name == THINKING:
            self.num_reasoning += phase.num_tokens
        self.outlet.put(
            Ended(
                phase=phase.name,
                member=phase.member,
                num_tokens=phase.num_tokens,
                seconds=now - phase.begun,
                num_prefilled=phase.num_prefilled,
                num_reused=phase.num_reused,
                handover=phase.handover,
                handover_seconds=(phase.first or now) - phase.begun if phase.handover else 0.0,
                is_forced=phase.is_forced,
            )
        )

    def _token(self, drawn: Drawn, text: str) -> Token:
        top = tuple((i, self._name(i), logprob) for i, logprob in drawn.top)
        return Token(
            id=drawn.id, text=text if drawn.logprob is None else self._name(drawn.id), logprob=drawn.logprob, top=top
        )

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)
