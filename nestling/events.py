"""What an answer is made of while it streams. The engine, other engines behind a URL and the think machine speak it;
the server, the terminal and the evaluation listen.

An answer is: for each phase `Started`, any number of `Text`, `Ended`; then one `Finished`, or one `Failed` in place of
whatever was to come. The texts of a phase joined are the phase: tags are not in them.
"""

from __future__ import annotations

from dataclasses import dataclass

THINKING, ANSWERING, TOOL_CALL = PHASES = ("thinking", "answering", "tool_call")

# Why an answer ended: by itself or at a stop string; at max_tokens while answering; at max_tokens while still thinking,
# which a reserve of zero allows; by the client.
STOP, LENGTH, THINKING_LENGTH, CANCELLED = REASONS = ("stop", "length", "thinking_length", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a text. Logprobs are natural logarithms under the member's own distribution, before temperature."""

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()  # the likeliest: id, text, logprob


@dataclass(frozen=True, kw_only=True)
class Started:
    """A phase begins."""

    phase: str
    member: str


@dataclass(frozen=True, kw_only=True)
class Text:
    """More of a phase. Text may lag behind its tokens: a character or a tag can be spread over several."""

    phase: str
    text: str
    tokens: tuple[Token, ...] = ()  # those that came with it, where they are known


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A phase is over."""

    phase: str
    member: str
    num_tokens: int  # generated in it, the closing tag included
    seconds: float  # from its start, hand-over included
    num_prefilled: int = 0  # tokens that the member read before its first own token
    num_reused: int = 0  # tokens of the prompt whose state was kept from an earlier turn
    handover: str = ""  # the mode, if the phase began with another member's text
    handover_seconds: float = 0.0  # until the first token of the phase was there
    is_forced: bool = False  # the budget ended it


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The answer is whole."""

    reason: str  # one of REASONS
    prompt_tokens: int
    completion_tokens: int  # all that was generated or forced, thoughts included
    reasoning_tokens: int
    cached_tokens: int = 0
    stop: str = ""  # the stop string that ended it


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The answer broke off, after whatever came before: what happened, for the person who asked."""

    message: str
    status: int = 500  # the HTTP status that it would have had, had nothing been sent


Event = Started | Text | Ended | Finished | Failed
