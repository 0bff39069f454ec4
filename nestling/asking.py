"""What a person asks of a runtime from the command line: the settings of an answer, and the request they make.

`generate` and `chat` share it. Nothing heavy is imported, so that a mistake is told before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nestling.events import Ended, Finished
from nestling.policy import Policy
from nestling.request import Request, check_stop
from nestling.sampling import Sampling

MAX_TOKENS = 2048  # where the context has room for them and nothing is asked
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class AskSettings:
    """Settings of one answer."""

    size: str = ""  # member that thinks and answers, where --think and --answer do not say otherwise
    think: str = ""  # member that thinks (default: the full one)
    answer: str = ""  # member that answers (default: the full one)
    thinking_budget: int | None = None  # tokens of thinking at most; 0: none (default: all but the reserve)
    answer_reserve: int | None = None  # tokens that thinking cannot take (default: 64, at most half of max-tokens)
    handover: str = "prefill"  # from thinker to answerer: prefill or shadow (exact), replay (approximate)
    replay: int = 16  # tokens that the answerer reads again in hand-over by replay
    closing: str = ""  # sentence that ends thoughts which the budget cuts
    max_tokens: int | None = None  # thoughts and answer together (default: 2048, or what the context has room for)
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # the likeliest tokens that hold this share of the probability
    top_k: int = 0  # at most so many of the likeliest tokens; 0: all
    min_p: float = 0.0  # only tokens at least this share as likely as the likeliest
    seed: int | None = None  # the same seed draws the same answer
    stop: tuple[str, ...] = ()  # end the answer before this text; may be given more than once
    system: str = ""  # message that goes before the conversation

    def policy(self) -> Policy:
        """Who thinks and who answers, and for how long."""
        return Policy(
            think=self.think or self.size,
            answer=self.answer or self.size,
            thinking_token_budget=self.thinking_budget,
            answer_reserve=self.answer_reserve,
            handover=self.handover,
            replay=self.replay,
            closing=self.closing,
        )

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed
        )

    def check(self, members: Collection[str]) -> None:
        """Refuse what no runtime with these members can do."""
        self.policy().check(members)
        self.sampling().check()
        check_stop(self.stop)
        if self.max_tokens is not None:
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens is {self.max_tokens}: expected a whole number, 1 or more.")
            self.policy().reserve(self.max_tokens)

    def request(self, engine: Any, prompt: str, *, messages: tuple[dict[str, str], ...] = ()) -> Request:
        """The request for a prompt. Without max_tokens it gets what the context has room for."""
        room = engine.context - len(engine.encode(prompt))
        return Request(
            prompt=prompt,
            # With no room left one token is asked for all the same: the engine then says what does not fit.
            max_tokens=self.max_tokens if self.max_tokens is not None else max(1, min(MAX_TOKENS, room)),
            policy=self.policy(),
            sampling=self.sampling(),
            stop=self.stop,
            is_plain=not messages,
            messages=messages,
        )


def conversation(settings: AskSettings) -> tuple[dict[str, str], ...]:
    """What stands before the first question."""
    return ({"role": "system", "content": settings.system},) if settings.system else ()


def prompt_of(engine: Any, messages: Sequence[dict[str, str]]) -> str:
    """The conversation as the model's template puts it, up to where the assistant begins."""
    from nestling.template import template_of  # brings Jinja

    return template_of(engine.tokenizer).render(messages)


def change(settings: AskSettings, members: Collection[str], **values: Any) -> AskSettings:
    """The settings with other values, if the members can do them."""
    changed = replace(settings, **values)
    changed.check(members)
    return changed


def phase_line(phase: Ended) -> str:
    """A phase in a line: who, how much, how fast."""
    line = f"{phase.phase:<9}  {phase.member:>4}  {phase.num_tokens:>5} tokens  {_rate(phase):>7} tokens/s"
    line += f"  {phase.seconds:>7.3f} s"
    notes = ["cut by the budget"] if phase.is_forced else []
    if phase.handover:
        notes.append(f"hand-over by {phase.handover} {1000 * phase.handover_seconds:.0f} ms")
    if phase.num_reused:
        notes.append(f"{phase.num_reused} tokens kept from before")
    return line + (f"  ({', '.join(notes)})" if notes else "")


def why_short(finished: Finished, *, has_answer: bool) -> str:
    """What to tell about an answer that did not end by itself; empty if it did."""
    told = {
        "length": "the answer was cut at max-tokens" if has_answer else "max-tokens left no room for an answer",
        "thinking_length": "max-tokens was spent on thinking: raise it, or set --thinking-budget or --answer-reserve",
        "cancelled": "cancelled",
    }
    return told.get(finished.reason, "")


def visible(text: str) -> str:
    """A model's text for a terminal: control characters other than line ends and tabs are spelled out, because they
    could move the cursor or change the terminal's settings."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _rate(phase: Ended) -> str:
    return f"{phase.num_tokens / phase.seconds:,.0f}" if phase.seconds > 0 else "-"
