"""Problems put to a runtime under a policy: what came back, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nestling import tasks
from nestling.events import ANSWERING, THINKING, Ended, Failed, Finished, Text
from nestling.policies.settings import PolicySettings
from nestling.policy import Policy
from nestling.request import Request, Runtime
from nestling.template import template_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One problem, solved or not."""

    is_solved: bool
    answer: str
    thinking_tokens: int
    answer_tokens: int
    is_forced: bool
    handover_seconds: float = 0.0
    first: tuple[tuple[int, dict[int, float]], ...] = ()  # answer tokens: the token, and logprobs of all


@dataclass(frozen=True)
class Asked:
    """A problem and its prompt."""

    problem: tasks.Problem
    prompt: str


def asked(tokenizer: Any, problems: Sequence[tasks.Problem]) -> list[Asked]:
    """Each problem as the chat template puts it."""
    template = template_of(tokenizer)
    return [Asked(one, template.render(tasks.messages(one)[:1])) for one in problems]


def request(one: Asked, policy: Policy, settings: PolicySettings, *, logprobs: int | None = None) -> Request:
    """The greedy request. The answer's reserve keeps thoughts to `max_thinking`, whatever the budget."""
    return Request(
        prompt=one.prompt, max_tokens=settings.max_thinking + settings.max_answer, policy=policy, logprobs=logprobs
    )


def solve_together(
    runtime: Runtime, asked: Sequence[Asked], policy: Policy, settings: PolicySettings, *, logprobs: int | None = None
) -> list[Outcome]:
    """All problems at once, as far as the runtime has room."""
    streams = [runtime.submit(request(one, policy, settings, logprobs=logprobs)) for one in asked]
    return [_outcome(one, stream) for one, stream in zip(asked, streams, strict=True)]


def solve_alone(runtime: Runtime, one: Asked, policy: Policy, settings: PolicySettings) -> tuple[float, float, Outcome]:
    """One problem and nothing else. Returns the seconds until the answer was whole, those until its first token was
    there, and the outcome."""
    begun = time.perf_counter()
    first = None
    events = []
    for event in runtime.submit(request(one, policy, settings)):
        if first is None and isinstance(event, Text) and event.phase == ANSWERING:
            first = time.perf_counter() - begun
        events.append(event)
    seconds = time.perf_counter() - begun
    return seconds, seconds if first is None else first, _outcome(one, events)


def _outcome(one: Asked, events: Any) -> Outcome:
    answer, tokens, forced, handover = "", {THINKING: 0, ANSWERING: 0}, False, 0.0
    first: list[tuple[int, dict[int, float]]] = []
    for event in events:
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        if isinstance(event, Text) and event.phase == ANSWERING:
            answer += event.text
            first += [(t.id, {i: p for i, _, p in t.top}) for t in event.tokens if t.top]
        elif isinstance(event, Ended):
            tokens[event.phase] = tokens.get(event.phase, 0) + event.num_tokens
            forced |= event.is_forced and event.phase == THINKING
            handover += event.handover_seconds
        elif isinstance(event, Finished) and event.reason not in ("stop", "length", "thinking_length"):
            raise RuntimeError(f"an answer was {event.reason}.")
    return Outcome(
        is_solved=tasks.score(one.problem, answer) == 1.0,
        answer=answer,
        thinking_tokens=tokens[THINKING],
        answer_tokens=tokens[ANSWERING],
        is_forced=forced,
        handover_seconds=handover,
        first=tuple(first),
    )
