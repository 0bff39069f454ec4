"""What `nestling eval --policies` measures."""

from __future__ import annotations

from dataclasses import dataclass

NO_BUDGET = "none"


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of `nestling eval --policies`."""

    problems: int = 500  # held-out problems of the reasoner's tasks, solved by every policy
    budgets: tuple[str, ...] = ("0", "16", "32", "48", "64", "96", NO_BUDGET)  # tokens of thinking at most
    max_thinking: int = 192  # tokens of thinking where there is no budget
    max_answer: int = 40  # tokens of an answer
    rows: int = 64  # answers at once while accuracy is measured
    timed: int = 14  # problems solved one at a time, by all policies in turn, while latency is measured
    handover_problems: int = 140  # problems on which the ways of hand-over are compared
    replays: tuple[str, ...] = ("1", "4", "16", "64")  # tokens read again in hand-over by replay

    def check(self) -> None:
        """Refuse what cannot be measured."""
        for name, least in (("problems", 1), ("max_thinking", 1), ("max_answer", 1), ("rows", 1), ("timed", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: expected {least} or more.")
        for text in self.budgets:
            if text != NO_BUDGET and not (text.isascii() and text.isdigit()):
                raise ValueError(f"budget '{text}' is neither a number of tokens nor '{NO_BUDGET}'.")
        for text in self.replays:
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise ValueError(f"replay '{text}' is not a number of tokens, 1 or more.")
        if max(self.timed, self.handover_problems) > self.problems:
            raise ValueError("timed and handover_problems are taken from the problems: expected no more than those.")
        for budget in self.limits:
            if budget is not None and budget > self.max_thinking:
                raise ValueError(f"budget {budget} is more than max_thinking {self.max_thinking}, so it never binds.")

    @property
    def limits(self) -> list[int | None]:
        """The budgets as numbers, the largest first; None: no budget."""
        told = {None if text == NO_BUDGET else int(text) for text in self.budgets}
        return sorted(told, key=lambda n: float("-inf") if n is None else -n)
