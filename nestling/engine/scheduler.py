"""Continuous batching: in each turn every running answer gets on by one step, and whoever is new joins.

A turn first decodes: rows that have one token to read, grouped by member, each group in one step. Then it prefills: the
oldest rows with more to read, about one segment in all, so that a long prompt never stops the others for long. What
a row holds is its own, so rows join and leave without anything being moved, and no answer depends on another. If there
is nothing to prefill, members that will answer read along with those that think.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nestling.engine.answer import Answer
from nestling.engine.decode import Decoder
from nestling.engine.draw import Drawn
from nestling.engine.handover import Trail, handed_over, why_not
from nestling.engine.prefill import last_boundary, read_segment
from nestling.engine.prefix import Prefixes
from nestling.engine.state import RowState
from nestling.engine.weights import Loaded
from nestling.events import CANCELLED, THINKING


@dataclass(frozen=True, kw_only=True)
class Running:
    """A member and what steps it."""

    loaded: Loaded
    decoder: Decoder


class Scheduler:
    """Runs answers. All of it happens in one thread."""

    def __init__(self, members: Mapping[str, Running], *, chunk: int, prefixes: Prefixes) -> None:
        self.members, self.chunk, self.prefixes = members, chunk, prefixes
        self.answers: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """The answer runs from the next turn on."""
        self.answers.append(answer)
        _guard([answer], answer.begin)

    def turn(self) -> None:
        """One step of everything that runs."""
        for answer in self.answers:
            if answer.outlet.is_cancelled:
                answer.finish(CANCELLED)
        self._decode()
        if not self._prefill():
            self._read_along()
        self.answers = [answer for answer in self.answers if not answer.is_over]

    def _decode(self) -> None:
        groups: dict[str, list[Answer]] = {}
        for answer in self.answers:
            if not answer.is_over and answer.is_decoding:
                groups.setdefault(answer.member, []).append(answer)
        for name, group in groups.items():
            _guard(group, lambda name=name, group=group: self._step(self.members[name], group))

    def _step(self, member: Running, group: list[Answer]) -> None:
        rows = [answer.state for answer in group if answer.state]
        logits = member.decoder.step(rows, [answer.ids[-1] for answer in group])
        highest, likeliest = logits.amax(-1).tolist(), logits.argmax(-1).tolist()
        for i, answer in enumerate(group):
            if answer.trail and answer.state:
                answer.trail.note(answer.state)
            is_simple = answer.request.sampling.temperature == 0.0 and answer.request.logprobs is None
            if is_simple and abs(highest[i]) < float("inf"):
                _guard([answer], lambda answer=answer, i=i: answer.accept(Drawn(likeliest[i])))
            else:
                self._draw(answer, logits[i])

    def _draw(self, answer: Answer, logits: Tensor) -> None:
        _guard([answer], lambda: answer.accept(answer.drawer.draw(logits)))

    def _prefill(self) -> bool:
        """About one segment of the oldest rows that have more than one token to read; whether there were any."""
        room = self.chunk
        for answer in self.answers:
            if room > 0 and not answer.is_over and not answer.is_decoding:
                room -= _guard([answer], lambda answer=answer: self._read(answer)) or 1
        return room < self.chunk

    def _read(self, answer: Answer) -> int:
        """One segment of one row; the next token is drawn after the last. Returns the tokens read."""
        if answer.state is None or answer.holder != answer.member:
            self._begin_state(answer)
        state = answer.state
        assert state is not None
        num_read, logits = self._read_segment(answer, state, answer.member)
        answer.phase.num_prefilled += num_read if answer.phase.first is None else 0
        if answer.trail:
            answer.trail.note(state)
        if answer.num_unread == 0:
            self._draw(answer, logits)
        return num_read

    def _read_segment(self, answer: Answer, state: RowState, member: str) -> tuple[int, Tensor]:
        """A member reads the next segment of an answer's context. Returns the tokens read, and the logits."""
        start = state.length
        logits = read_segment(self.members[member].decoder, state, answer.ids, self.chunk)
        if state.length == min(answer.tag // self.chunk * self.chunk, last_boundary(len(answer.ids), self.chunk)):
            self.prefixes.keep(member, answer.ids, state)
        return state.length - start, logits

    def _begin_state(self, answer: Answer) -> None:
        """A state for the member that generates next: what it read along, what another hands over, what was kept from
        an earlier turn, or an empty one."""
        member, old = self.members[answer.member].loaded, answer.state
        state = None
        if answer.shadow is not None and answer.member == answer.answer:
            state, answer.shadow = answer.shadow, None
            answer.phase.num_prefilled, answer.phase.num_reused = (
                answer.num_shadowed,
                state.length - answer.num_shadowed,
            )
        elif answer.trail and old is not None:
            thinker = self.members[answer.holder].loaded
            if not why_not(thinker, member):
                state = handed_over(old, answer.trail, thinker, member, length=len(answer.ids))
            answer.trail = Trail(answer.trail.replay)
        if state is None:
            state = self._found(answer, member)
            answer.phase.num_reused = state.length
            if not answer.phase.handover:
                answer.num_cached = state.length
        answer.state, answer.holder = state, answer.member

    def _found(self, answer: Answer, member: Loaded) -> RowState:
        limit = last_boundary(min(len(answer.ids), answer.num_prompt), self.chunk)
        found = self.prefixes.find(member.name, answer.ids, limit=limit)
        return RowState(member.layout, member.dtype) if found is None else found

    def _read_along(self) -> None:
        """One segment of a context that another member is thinking in, by the one that will answer."""
        for answer in self.answers:
            if answer.is_over or not answer.is_shadowed or answer.phase.name != THINKING:
                continue
            if answer.shadow is None or answer.shadow.length < last_boundary(len(answer.ids), self.chunk):
                _guard([answer], lambda answer=answer: self._read_shadow(answer))
                return

    def _read_shadow(self, answer: Answer) -> None:
        if answer.shadow is None:
            answer.shadow = self._found(answer, self.members[answer.answer].loaded)
            answer.num_shadowed = 0
        if answer.shadow.length < last_boundary(len(answer.ids), self.chunk):
            answer.num_shadowed += self._read_segment(answer, answer.shadow, answer.answer)[0]


def _guard(answers: list[Answer], work: Callable[[], int | None]) -> int | None:
    """Do it; whatever goes wrong ends these answers and no others."""
    try:
        return work()
    except FloatingPointError as error:
        message = f"{error}: the weights or the state of this answer are broken. Nothing else is affected."
    except Exception as error:  # a thread that serves everybody must not end with one answer
        message = f"the engine failed: {type(error).__name__}: {error}"
    for answer in answers:
        answer.fail(message)
    return None
