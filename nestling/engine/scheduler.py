"""Continuous batching: in each turn every running answer gets on by one step, and whoever is new joins.

A turn first decodes: rows that have one token to read, grouped by member, each group in one step. Then it prefills: the
oldest rows with more to read, about one segment in all, so that a long prompt never stops the others for long. What
a row holds is its own, so rows join and leave without anything being moved, and no answer depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nestling.engine.answer import Answer
from nestling.engine.decode import Decoder
from nestling.engine.draw import Drawn
from nestling.engine.prefill import read_segment, segment_end
from nestling.engine.state import RowState
from nestling.engine.weights import Loaded
from nestling.events import CANCELLED


@dataclass(frozen=True, kw_only=True)
class Running:
    """A member and what steps it."""

    loaded: Loaded
    decoder: Decoder


class Scheduler:
    """Runs answers. All of it happens in one thread."""

    def __init__(self, members: Mapping[str, Running], *, chunk: int) -> None:
        self.members, self.chunk = members, chunk
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
        self._prefill()
        self.answers = [answer for answer in self.answers if not answer.is_over]

    def _decode(self) -> None:
        groups: dict[str, list[Answer]] = {}
        for answer in self.answers:
            if not answer.is_over and answer.holder == answer.member and answer.state and answer.num_unread == 1:
                groups.setdefault(answer.member, []).append(answer)
        for name, group in groups.items():
            _guard(group, lambda name=name, group=group: self._step(self.members[name], group))

    def _step(self, member: Running, group: list[Answer]) -> None:
        rows = [answer.state for answer in group if answer.state]
        logits = member.decoder.step(rows, [answer.ids[-1] for answer in group])
        highest, likeliest = logits.amax(-1).tolist(), logits.argmax(-1).tolist()
        for i, answer in enumerate(group):
            is_simple = answer.request.sampling.temperature == 0.0 and answer.request.logprobs is None
            if is_simple and abs(highest[i]) < float("inf"):
                _guard([answer], lambda answer=answer, i=i: answer.accept(Drawn(likeliest[i])))
            else:
                self._draw(answer, logits[i])

    def _draw(self, answer: Answer, logits: Tensor) -> None:
        _guard([answer], lambda: answer.accept(answer.drawer.draw(logits)))

    def _prefill(self) -> None:
        """About one segment of the oldest rows that have more than one token to read."""
        room = self.chunk
        for answer in self.answers:
            if room <= 0:
                return
            if answer.is_over or (answer.holder == answer.member and answer.state and answer.num_unread == 1):
                continue
            room -= _guard([answer], lambda answer=answer: self._read(answer)) or 0

    def _read(self, answer: Answer) -> int:
        """One segment of one row; the next token is drawn after the last. Returns the tokens read."""
        member = self.members[answer.member].loaded
        if answer.state is None or answer.holder != answer.member:
            answer.state, answer.holder = RowState(member.layout, member.dtype), answer.member
        state = answer.state
        num_read = segment_end(state.length, len(answer.ids), self.chunk) - state.length
        logits = read_segment(member, state, answer.ids, self.chunk)
        if answer.phase.first is None:
            answer.phase.num_prefilled += num_read
        if answer.num_unread == 0:
            self._draw(answer, logits)
        return num_read


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
