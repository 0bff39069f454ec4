"""One request to a runtime, and what a runtime is: the engine on this machine, or other engines behind URLs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nestling.events import Event
from nestling.policy import Policy
from nestling.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked. A prompt is text or token ids; text is read as it stands, special tokens included."""

    prompt: str | tuple[int, ...]
    max_tokens: int  # thoughts and answer together
    policy: Policy = Policy()
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # end the answer before the first of these; thoughts are not searched
    stop_tokens: tuple[int, ...] = ()  # besides the model's own
    logprobs: int | None = None  # with each token so many of the likeliest; not set: no logprobs at all
    is_plain: bool = False  # a bare continuation by policy.answer: no phases, tags are text
    messages: tuple[Mapping[str, Any], ...] = ()  # what the prompt was made from, for engines that only chat


def check_stop(stop: object) -> None:
    """Refuse stop strings that could never be found, or that are letters where a tuple of texts is meant."""
    if not isinstance(stop, (tuple, list)) or not all(isinstance(one, str) and one for one in stop):
        raise ValueError(f"stop is {stop!r}: expected texts of one letter or more.")


class Full(RuntimeError):
    """More is asked at once than was admitted: try again later."""


class TooLong(ValueError):
    """The prompt, or the prompt and max_tokens, are longer than what is admitted."""


class Stream(Protocol):
    """The events of one answer as they come: read it once, in a thread or in an event loop."""

    def __iter__(self) -> Iterator[Event]: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None:
        """Stop the work and give its memory back; the stream ends with Finished("cancelled"). From any thread."""
        ...


class Runtime(Protocol):
    """Whatever answers requests."""

    @property
    def members(self) -> tuple[str, ...]:
        """The names that a policy may give, the full member first."""
        ...

    def submit(self, request: Request) -> Stream:
        """Begin an answer. ValueError for what cannot be done, TooLong, or Full; nothing is begun then. From any
        thread."""
        ...

    def close(self) -> None:
        """Cancel everything and give everything back."""
        ...
