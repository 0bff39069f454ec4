"""Elastic budget control: text goes in token by token, and out comes what it is and what to do next.

A machine follows one answer. It splits the text at the tags into phases (events.py), counts tokens, and says when the
thoughts must end, what is written then, and when another member takes over. It knows neither tokens nor models: whoever
generates gives it the text of each token and does what it says, so the engine, other engines behind a URL and a test
follow the same rules.

    for action in machine.begin():                     # before the first token
        ...
    for action in machine.take(text):                  # after each token
        Say     this text belongs to this phase
        Force   write this text instead of drawing: encode it and append it to the context, do not give it to `take`
        Switch  from now on the member of this phase generates
        Done    stop, for this reason; `end()` gives what is held back

The rules. Thoughts begin at the opening tag, in the prompt or in the text, as often as it comes; all of them count
against one budget. They end at the closing tag, at a tool call, at a stop token, or when the budget is spent: then
the sentence `policy.closing`, where it does not cost the answer its reserve, and the closing tag are forced. Nothing is
forced inside a tool call. A closing tag with nothing to
close, and an opening tag inside thoughts, are dropped. Text that may become a tag is held back until it is decided, so
the texts of a phase joined do not depend on how the text was cut into tokens. White space between a phase's start and
a tag that ends it belongs to nobody and is dropped, if the phase is an answer in which nothing was said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

from nestling.events import ANSWERING, LENGTH, STOP, THINKING, THINKING_LENGTH, TOOL_CALL
from nestling.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The texts that begin and end thoughts and tool calls. Empty: there is no such tag. A tool call without a tag that
    ends it runs to the end of the answer."""

    open: str = ""
    close: str = ""
    tool_open: str = ""
    tool_close: str = ""

    def __post_init__(self) -> None:
        if bool(self.open) != bool(self.close):
            raise ValueError(f"tags: '{self.open or self.close}' stands alone; thoughts need an open and a close tag.")
        if self.tool_close and not self.tool_open:
            raise ValueError(f"tags: tool_close is '{self.tool_close}', but no tag opens a tool call.")
        # Otherwise which of two tags a text is would depend on how it was cut.
        for inner, outer in permutations([tag for tag in (self.open, self.close, self.tool_open) if tag], 2):
            if inner in outer:
                raise ValueError(f"tags: '{inner}' is part of '{outer}'. Tags must not contain one another.")


@dataclass(frozen=True)
class Say:
    """More text of a phase."""

    phase: str
    text: str


@dataclass(frozen=True)
class Force:
    """Write this instead of drawing. Its tokens belong to the thoughts, and it has already been counted."""

    text: str


@dataclass(frozen=True)
class Switch:
    """Another phase begins, with the member that the policy has for it."""

    phase: str


@dataclass(frozen=True)
class Done:
    """The answer is over."""

    reason: str  # STOP, LENGTH or THINKING_LENGTH


Action = Say | Force | Switch | Done


class Machine:
    """The phases of one answer. `phase` is the one that the next token belongs to."""

    def __init__(
        self, policy: Policy, *, tags: Tags, max_tokens: int, is_open: bool, measure: Callable[[str], int]
    ) -> None:
        """is_open: the prompt ends inside thoughts. measure: the number of tokens that a forced text will take."""
        if is_open and not tags.close:
            raise ValueError("the prompt ends inside thoughts, but no tag is known that closes them.")
        for tag in filter(None, (tags.open, tags.close, tags.tool_open)):
            if tag in policy.closing:
                raise ValueError(f"closing: the sentence contains the tag '{tag}', which would end it.")
        self.phase = THINKING if is_open else ANSWERING
        self.num_tokens = 0  # all so far, forced ones included
        self.num_thinking = 0  # drawn while thinking
        self._tags, self._measure = tags, measure
        self._tag_cost = measure(tags.close) if tags.close else 0
        self._max_tokens, self._budget = max_tokens, policy.thinking_token_budget
        self._reserve = policy.reserve(max_tokens)
        self._closing = policy.closing
        self._closing_cost = measure(self._closing + tags.close) if tags.close else 0
        if self._reserve + self._closing_cost >= max_tokens:  # there would be no room to think
            self._closing, self._closing_cost = "", self._tag_cost
        self._held = ""
        self._has_spoken = False  # something was said in this phase
        self._is_done = False

    @property
    def room(self) -> int:
        """Tokens that may be drawn before something is forced or cut."""
        if self._is_done:
            return 0
        left = self._max_tokens - self.num_tokens
        if self.phase != THINKING:
            return left
        of_budget = left if self._budget is None else self._budget - self.num_thinking
        of_length = left - self._reserve - (self._closing_cost if self._reserve else 0)
        if of_length <= 0 and not self._can_close():
            of_length = left  # no answer would fit behind the closing tag: the thoughts may as well go on
        return max(0, min(of_budget, of_length))

    def begin(self) -> list[Action]:
        """What to do before the first token: thoughts without a budget end at once."""
        return self._settle()

    def take(self, text: str, *, count: int = 1) -> list[Action]:
        """What `count` more tokens mean. Their text may be empty, if it comes with a later token; tags are in it, also
        those that are special tokens."""
        if self._is_done:
            return []
        self._count(count)
        return [*self._read(text), *self._settle()]

    def stop(self, *, count: int = 1) -> list[Action]:
        """The model ended its text with `count` tokens that are no text. Thoughts do not end an answer: they are closed
        and the answer begins, without the stop token in its context."""
        if self._is_done:
            return []
        self._count(count)
        if self.phase == THINKING and self._can_close():
            return [*self._close(), *self._settle()]
        self._is_done = True
        return [*self.end(), Done(STOP)]

    def end(self) -> list[Say]:
        """What is held back, when nothing more will come."""
        held, self._held = self._held, ""
        return self._say(held)

    def _count(self, count: int) -> None:
        self.num_tokens += count
        if self.phase == THINKING:
            self.num_thinking += count

    def _read(self, text: str) -> list[Action]:
        """Split what is held and `text` at the tags; hold back the end if it may be the beginning of one."""
        actions: list[Action] = []
        rest = self._held + text
        while found := self._first_tag(rest):
            start, tag = found
            before, rest = rest[:start], rest[start + len(tag) :]
            phase = self._after(tag)
            is_blank = self.phase == ANSWERING and not self._has_spoken and not before.strip()
            actions += [] if is_blank else self._say(before)
            if phase != self.phase:
                actions.append(self._switch(phase))
            elif is_blank:  # a closing tag with nothing to close: what is before it still waits
                rest = before + rest
        cut = len(rest) - self._num_open(rest)
        if self.phase == ANSWERING and not self._has_spoken and not rest[:cut].strip():
            cut = 0
        self._held = rest[cut:]
        return actions + self._say(rest[:cut])

    def _settle(self) -> list[Action]:
        """Force or end what has no room left."""
        if self._is_done or self.room > 0:
            return []
        if self.phase == THINKING and self._can_close():
            return self._close()
        self._is_done = True
        return [Done(THINKING_LENGTH if self.phase == THINKING else LENGTH)]

    def _close(self) -> list[Action]:
        """End the thoughts by force. A tag that is spelled in several tokens and has begun is completed; one that is a
        token of its own cannot have begun, so what looks like it is text."""
        close, held, self._held = self._tags.close, self._held, ""
        num_begun = _overlap(held, close) if self._tag_cost > 1 else 0
        said = self._say(held[: len(held) - num_begun])
        forced = close[num_begun:]
        is_cheap = self.num_tokens + self._closing_cost + max(1, self._reserve) <= self._max_tokens
        if self._has_spoken and not num_begun and is_cheap:
            said += self._say(self._closing)
            forced = self._closing + close
        self.num_tokens += self._measure(forced)
        return [*said, Force(forced), self._switch(ANSWERING)]

    def _can_close(self) -> bool:
        """Whether a forced end leaves room for an answer."""
        return self.num_tokens + self._tag_cost < self._max_tokens

    def _switch(self, phase: str) -> Switch:
        self.phase, self._has_spoken = phase, False
        return Switch(phase)

    def _say(self, text: str) -> list[Say]:
        if not text:
            return []
        self._has_spoken = True
        return [Say(self.phase, text)]

    def _listed(self) -> list[str]:
        """The tags that mean something in this phase."""
        tags = self._tags
        listed = (tags.tool_close,) if self.phase == TOOL_CALL else (tags.open, tags.close, tags.tool_open)
        return [tag for tag in listed if tag]

    def _first_tag(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(tag), tag) for tag in self._listed()]
        return min((pair for pair in found if pair[0] >= 0), default=None)

    def _after(self, tag: str) -> str:
        """The phase behind a tag that stands in this one."""
        if self.phase == TOOL_CALL:
            return ANSWERING
        return {self._tags.open: THINKING, self._tags.tool_open: TOOL_CALL}.get(tag, ANSWERING)

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that a tag begins with."""
        return max((_overlap(text, tag) for tag in self._listed()), default=0)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
