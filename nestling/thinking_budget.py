"""One thinking budget out of the many spellings that clients know.

`thinking_token_budget` is ours and vLLM's. What other servers call it means the same here, so a client made for one of
them works unchanged. A budget that is not understood would be thinking that nobody wanted to pay for, so an unknown
field that sounds like one is an error, and so are two that disagree.

An effort is no number of tokens: it is a share of `max_tokens`, and a number beside it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Spelling -> who knows it. A dot leads into an object.
NUMBERS = {
    "thinking_token_budget": "Nestling, vLLM, Dynamo",
    "elastic.thinking_token_budget": "Nestling",
    "custom_params.thinking_budget": "SGLang",
    "thinking_budget": "Qwen",
    "chat_template_kwargs.thinking_budget": "Qwen, SGLang",
    "thinking_budget_tokens": "llama.cpp",
    "reasoning_budget": "llama.cpp, NVIDIA's Nemotron 3",
    "max_thinking_tokens": "NIM",
    "nvext.max_thinking_tokens": "NIM",
    "thinking.budget_tokens": "Anthropic",
    "reasoning.max_tokens": "OpenRouter",
    "reasoning_max_tokens": "FastDeploy",
}
# These say -1 where there is no limit; elsewhere that is an error.
UNLIMITED = (
    "thinking_budget",
    "chat_template_kwargs.thinking_budget",
    "thinking_budget_tokens",
    "reasoning_budget",
)
SWITCHES = {
    "enable_thinking": "Qwen",
    "chat_template_kwargs.enable_thinking": "Qwen, SGLang, vLLM",
    "chat_template_kwargs.thinking": "DeepSeek, Granite",
    "thinking.type": "Anthropic, GLM",
    "reasoning.enabled": "OpenRouter",
}
EFFORTS = {
    "reasoning_effort": "OpenAI",
    "reasoning.effort": "OpenAI, OpenRouter",
    "chat_template_kwargs.reasoning_effort": "SGLang, vLLM",
}
# Of max_tokens; the reserve for the answer comes first. None: as much as fits.
SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": None, "max": None}
TYPES = {"enabled": True, "adaptive": True, "auto": True, "disabled": False}  # of `thinking.type`
OBJECTS = (
    "custom_params",
    "nvext",
    "thinking",
    "reasoning",
)  # that have fields of budgets and, but for the next, no other
OTHERS = {"reasoning": ("exclude",)}
SUSPECT = ("think", "reason", "budget")
FIELDS = tuple(dict.fromkeys(name.partition(".")[0] for name in (*NUMBERS, *SWITCHES, *EFFORTS)))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says about thinking."""

    tokens: int | None = None  # at most; 0: none at all; not set: no limit
    is_set: bool = False  # whether `tokens` was said, as a number or by a switch
    is_on: bool | None = None  # what a switch says
    effort: str = ""

    def budget(self, max_tokens: int) -> int | None:
        """Tokens of thinking, given those of the whole answer."""
        if self.is_set or not self.effort:
            return self.tokens
        share = SHARES[self.effort]
        return None if share is None else int(share * max_tokens)

    @property
    def says(self) -> bool:
        """Whether the request limits thinking in any way."""
        return self.is_set or bool(self.effort)


def find(body: Mapping[str, Any]) -> Asked:
    """What the fields of a request ask for. ValueError if one is not understood or two disagree."""
    check_names(body)
    numbers = {name: _number(name, value) for name, value in _given(body, NUMBERS)}
    switches = {name: _switch(name, value) for name, value in _given(body, SWITCHES)}
    efforts = {name: _effort(name, value) for name, value in _given(body, EFFORTS)}
    _agree(numbers, body)
    _agree(switches, body)
    _agree(efforts, body)
    told = [(name, tokens != 0) for name, tokens in numbers.items()]
    told += list(switches.items()) + [(name, effort != "none") for name, effort in efforts.items()]
    _agree(dict(told), body)  # whether there is thinking at all
    is_on = next(iter(switches.values()), None)
    effort = next(iter(efforts.values()), "")
    if numbers:
        return Asked(tokens=next(iter(numbers.values())), is_set=True, is_on=is_on, effort=effort)
    return Asked(tokens=0 if is_on is False else None, is_set=is_on is False, is_on=is_on, effort=effort)


def check_names(body: Mapping[str, Any]) -> None:
    """Refuse fields inside the objects of other servers that are not known: they would be lost."""
    known = {*NUMBERS, *SWITCHES, *EFFORTS}
    for name in OBJECTS:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {_short(value)}: expected an object.")
        for inner in value:
            if f"{name}.{inner}" not in known and inner not in OTHERS.get(name, ()):
                inside = [one for one in known if one.startswith(f"{name}.")]
                raise ValueError(f"'{name}.{str(inner)[:60]}' is not known. Known: {', '.join(sorted(inside))}.")


def sounds_like_one(name: str) -> bool:
    """Whether an unknown field may mean a thinking budget."""
    return any(word in name.lower() for word in SUSPECT)


def _given(body: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        outer, _, inner = name.partition(".")
        value = body.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        if value is not None:
            yield name, value


def _number(name: str, value: Any) -> int | None:
    if value == -1 and type(value) is int and name in UNLIMITED:
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {_short(value)}: expected a whole number of tokens, 0 or more.")
    return value


def _switch(name: str, value: Any) -> bool:
    if name == "thinking.type" and isinstance(value, str) and value in TYPES:
        return TYPES[value]
    if name == "thinking.type" or type(value) is not bool:
        expected = ", ".join(TYPES) if name == "thinking.type" else "true or false"
        raise ValueError(f"{name} is {_short(value)}: expected {expected}.")
    return value


def _effort(name: str, value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in SHARES:
        raise ValueError(f"{name} is {_short(value)}: expected one of {', '.join(SHARES)}.")
    return value.lower()


def _agree(told: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Refuse two spellings that say different things."""
    first, *others = told or [""]
    for other in others:
        if told[other] != told[first]:
            values = dict(_given(body, {first: "", other: ""}))
            raise ValueError(
                f"{first} ({_short(values[first])}) and {other} ({_short(values[other])}) disagree. Send one of them."
            )


def _short(value: Any) -> str:
    return repr(value)[:60] if not isinstance(value, str) else f"'{value[:60]}'"
