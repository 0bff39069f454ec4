"""The machine of a bare continuation: no phases, tags are text."""

from __future__ import annotations

from nestling.events import ANSWERING, LENGTH, STOP
from nestling.think import Action, Done, Say


class Plain:
    """Everything is the answer, until `max_tokens`."""

    phase = ANSWERING

    def __init__(self, max_tokens: int) -> None:
        self.room = max_tokens

    def begin(self) -> list[Action]:
        """What is to be done before the first token."""
        return []

    def take(self, text: str, *, count: int = 1) -> list[Action]:
        """See think.Machine."""
        self.room -= count
        said: list[Action] = [Say(ANSWERING, text)] if text else []
        return said if self.room > 0 else [*said, Done(LENGTH)]

    def stop(self, *, count: int = 1) -> list[Action]:
        """The model ended its text."""
        return [Done(STOP)]

    def end(self) -> list[Say]:
        """Nothing is held back."""
        return []
