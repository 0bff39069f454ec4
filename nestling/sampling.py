"""How the next token is drawn: the settings. The drawing itself is the engine's."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of one request's draws."""

    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # the likeliest tokens that hold this share of the probability
    top_k: int = 0  # at most so many of the likeliest; 0: all
    min_p: float = 0.0  # only tokens at least this share as likely as the likeliest
    seed: int | None = None  # the same seed draws the same answer; not set: another one each time

    def check(self) -> None:
        """Refuse values that no draw can have, NaN included."""
        for field, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not low <= value <= high:
                raise ValueError(f"{field} is {value!r}: expected a number from {low:g} to {high:g}.")
        if self.top_p == 0.0:
            raise ValueError("top_p is 0: no token would be left. Use temperature 0 for the likeliest one.")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}: expected a whole number, 0 for all tokens.")
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed is {self.seed!r}: expected a whole number of 64 bits.")
