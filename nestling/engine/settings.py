"""How an engine is set up, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the engine."""

    dtype: str = "as stored"  # what weights are held in: as stored, fp32, bf16 or fp16
    max_rows: int = 64  # answers that run at once
    max_waiting: int = 256  # answers that may wait for a place; more are refused
    max_tokens_in_flight: int = 1_000_000  # prompts and max_tokens of all that run or wait; more are refused
    max_prompt: int = 0  # longest prompt in tokens; 0: what the model's context holds
    chunk: int = 64  # tokens read at once; states are kept and handed over at multiples of it
    prefix_bytes: int = 256 * 1024**2  # states kept for the next turn of a conversation; 0: none
    threads: int = 0  # of torch; 0: as they are
    decoder: str = "auto"  # stock, lean, or auto: lean where it knows the architecture

    def check(self) -> None:
        """Refuse what cannot be."""
        for field, least in (("max_rows", 1), ("max_waiting", 0), ("max_tokens_in_flight", 1), ("max_prompt", 0),
                             ("chunk", 2), ("prefix_bytes", 0), ("threads", 0)):  # fmt: skip
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(f"{field} is {value!r}: expected a whole number, {least} or more.")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine does at the moment, and what it holds."""

    rows_running: int
    rows_waiting: int
    tokens_in_flight: int  # prompts and max_tokens of all that run or wait
    weight_bytes: int  # the nest's storage
    copied_bytes: int  # what members hold beside it
    row_bytes: int  # states of what runs
    prefix_bytes: int  # states kept for later turns
    num_prefix_hits: int = 0
    num_prefix_misses: int = 0
    num_reused: int = 0  # tokens that were not read again
