"""Who thinks, who answers, and how much thinking there may be: the settings of elastic budget control.

Star Elastic (arXiv 2605.07182) splits an answer at the end of its thoughts: one member thinks, another answers. The
names here are the fields of a request, the flags of the command line and the words of the documentation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PREFILL, SHADOW, REPLAY = HANDOVERS = ("prefill", "shadow", "replay")
LEAST_RESERVE = 64  # tokens kept for the answer if nothing else is asked for


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one answer is made."""

    think: str = ""  # member that thinks; the full one if empty
    answer: str = ""  # member that answers; the full one if empty
    thinking_token_budget: int | None = None  # tokens of thinking at most; 0: none, not set: all but the reserve
    answer_reserve: int | None = None  # tokens of max_tokens that thinking cannot take (default: 64, at most half)
    handover: str = "prefill"  # prefill, shadow (both exact) or replay (approximate)
    replay: int = 16  # tokens that the answering member reads again in hand-over by replay
    closing: str = ""  # sentence that ends thoughts which the budget cuts, before the closing tag

    def check(self, members: Collection[str]) -> None:
        """Refuse what cannot be done, with what can. members: the names that there are."""
        for field in ("think", "answer"):
            name = getattr(self, field)
            if name and name not in members:
                raise ValueError(f"{field}: there is no member '{name}'. Members: {', '.join(members)}.")
        if self.handover not in HANDOVERS:
            raise ValueError(f"handover '{self.handover}' is not known: expected one of {', '.join(HANDOVERS)}.")
        for field, least in (("thinking_token_budget", 0), ("answer_reserve", 0), ("replay", 1)):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{field} is {value!r}: expected a whole number of tokens, {least} or more.")

    def reserve(self, max_tokens: int) -> int:
        """Tokens of `max_tokens` that thinking cannot take."""
        if self.answer_reserve is None:
            return min(LEAST_RESERVE, max_tokens // 2)
        if self.answer_reserve > max_tokens:
            raise ValueError(
                f"answer_reserve {self.answer_reserve} is more than max_tokens {max_tokens}: nothing is left to think "
                "with. Lower the reserve or raise max_tokens."
            )
        return self.answer_reserve
