"""The machine of a bare continuation: no phases, tags are text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nestling.events import ANSWERING, LENGTH, STOP


@dataclass(frozen=True)
class Say:
    phase: str
    text: str


@dataclass(frozen=True)
class Force:
    text: str


@dataclass(frozen=True)
class Switch:
    phase: str


@dataclass(frozen=True)
class Done:
    reason: str


class Plain:
    """Everything is the answer, until `max_tokens`."""

    phase = ANSWERING

    def __init__(self, max_tokens: int) -> None:
        self.room = max_tokens

    def begin(self) -> list[Any]:
        """What is to be done before the first token."""
        return []

    def take(self, text: str, *, count: int = 1) -> list[Any]:
        """See think.Machine."""
        self.room -= count
        said = [Say(ANSWERING, text)] if text else []
        return said if self.room > 0 else [*said, Done(LENGTH)]

    def stop(self, *, count: int = 1) -> list[Any]:
        """The model ended its text."""
        return [Done(STOP)]

    def end(self) -> list[Any]:
        """Nothing is held back."""
        return []
