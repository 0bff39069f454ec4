"""How the server is set up: who may ask, how much at once, and how answers are made where requests do not say."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from nestling.policy import Policy


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `nestling serve`."""

    host: str = "127.0.0.1"  # address to listen on; anything but loopback is open to others: set a key then
    port: int = 8000  # 0: a free one, which the ready line names
    api_key: str = ""  # key that /v1 and /metrics ask for, as a bearer token; @FILE reads it from a file
    name: str = ""  # what the nest is called in model ids; the folder's name if empty
    think: str = ""  # who thinks where a request does not say: a member, or without a nest URL[#model]
    answer: str = ""  # who answers where a request does not say: a member, or without a nest URL[#model]
    thinking_token_budget: int | None = None  # tokens of thinking where a request does not say
    handover: str = "prefill"  # prefill, shadow or replay, where a request does not say
    max_tokens: int = 1024  # thoughts and answer together where a request does not say, or less if no more fits
    max_requests: int = 512  # requests that are read or answered at once; more get a 429
    max_body: int = 4 * 1024**2  # bytes of a request's body; more get a 413
    max_choices: int = 8  # answers that one request may ask for
    read_timeout: float = 30.0  # seconds in which a request's body must have come
    write_timeout: float = 60.0  # seconds that a reader may leave a full connection unread
    grace: float = 10.0  # seconds that running answers get to end when the server is told to stop

    def check(self) -> None:
        """Refuse what cannot be."""
        for field, least in (("port", 0), ("max_tokens", 1), ("max_requests", 1), ("max_body", 1), ("max_choices", 1),
                             ("read_timeout", 0), ("write_timeout", 0), ("grace", 0)):  # fmt: skip
            if not getattr(self, field) >= least:
                raise ValueError(f"{field} is {getattr(self, field)!r}: expected {least} or more.")
        if self.port > 65535:
            raise ValueError(f"port is {self.port}: expected 0 to 65535.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    def key(self) -> bytes:
        """The key itself; empty if none is asked for."""
        text = self.api_key
        if text.startswith("@"):
            file = Path(text[1:])
            text = file.read_text("utf-8").strip() if file.is_file() else ""
            if not text:
                raise ValueError(f"api_key: '{file}' is no file with a key in it.")
        return text.encode()

    def policy(self) -> Policy:
        """What an answer is made of where a request does not say, with members' names."""
        return Policy(
            think=self.think,
            answer=self.answer,
            thinking_token_budget=self.thinking_token_budget,
            handover=self.handover,
        )
