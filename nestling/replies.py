"""Events as OpenAI's clients read them: chunks of a stream, or one body.

A form follows all answers to one request. Thoughts are `reasoning` and, the same text, `reasoning_content`; a tool
call becomes `tool_calls` once it is whole, if it is a call and the request had tools, else it is content with its tags.
In /v1/completions everything is text, tags included. What OpenAI has no place for stands under `nestling`: each phase
with its member, tokens and seconds, and the reason in our own words, which say whether `length` fell on the thoughts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nestling.events import (
    ANSWERING,
    LENGTH,
    STOP,
    THINKING,
    THINKING_LENGTH,
    TOOL_CALL,
    Ended,
    Event,
    Finished,
    Started,
    Text,
    Token,
)
from nestling.think import Tags

SURROGATES = range(0xD800, 0xE000)
REASONS = {STOP: "stop", LENGTH: "length", THINKING_LENGTH: "length"}  # of OpenAI


@dataclass
class Choice:
    """One answer so far."""

    said: dict[str, list[str]] = field(default_factory=dict)  # key of the message -> its pieces
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, list[Token]] = field(default_factory=dict)  # phase -> tokens with logprobs
    phases: list[dict[str, Any]] = field(default_factory=list)
    finished: Finished | None = None
    reason: str = ""
    call: list[str] = field(default_factory=list)  # pieces of the tool call that is under way
    before: str = ""  # the phase before this one
    has_begun: bool = False
    num_letters: int = 0

    def text(self, key: str) -> str:
        """A key's pieces joined."""
        return "".join(self.said.get(key, ()))


@dataclass(kw_only=True)
class _Form:
    """What both kinds of answers have in common."""

    model: str
    tags: Tags = Tags()  # noqa: RUF009, frozen
    num_choices: int = 1
    num_prompts: int = 1  # choices i and i + num_prompts have one prompt
    has_usage: bool = False  # in a stream
    has_logprobs: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.num_choices)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Pieces after the ends of all answers: what they took, if the client asked."""
        return [self._chunk([], usage=self.usage())] if self.has_usage else []

    def usage(self) -> dict[str, Any]:
        """Tokens of all answers; a prompt with several answers counts once."""
        ends = [(i, choice.finished) for i, choice in enumerate(self.choices) if choice.finished]
        prompts = {i % self.num_prompts: end for i, end in reversed(ends)}.values()
        prompt, completion = sum(end.prompt_tokens for end in prompts), sum(end.completion_tokens for _, end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
            "completion_tokens_details": {"reasoning_tokens": sum(end.reasoning_tokens for _, end in ends)},
        }

    def _note(self, choice: Choice, event: Event) -> None:
        """Keep what the end of the answer tells about the whole."""
        if isinstance(event, Ended):
            choice.before = event.phase
            told = {
                "phase": event.phase,
                "member": event.member,
                "tokens": event.num_tokens,
                "seconds": event.seconds,
                "prefilled": event.num_prefilled,
                "reused": event.num_reused,
                "handover": event.handover,
                "handover_seconds": event.handover_seconds,
                "is_forced": event.is_forced,
            }
            choice.phases.append(told)
        elif isinstance(event, Finished):
            choice.finished, choice.reason = event, REASONS.get(event.reason, "stop")
        elif isinstance(event, Text) and self.has_logprobs:
            choice.tokens.setdefault(event.phase, []).extend(event.tokens)

    def _nestling(self, choice: Choice) -> dict[str, Any]:
        assert choice.finished is not None
        return {"reason": choice.finished.reason, "phases": choice.phases}

    def _ended(self, index: int, key: str) -> dict[str, Any]:
        choice = self.choices[index]
        ended = {"index": index, key: {} if key == "delta" else "", "logprobs": None, "finish_reason": choice.reason}
        ended |= {"stop_reason": choice.finished.stop or None if choice.finished else None}
        return self._chunk([ended]) | {"nestling": self._nestling(choice)}

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        told = [self._nestling(choice) for choice in self.choices]
        return self._body(choices) | {
            "usage": self.usage(),
            "nestling": told[0] if len(told) == 1 else {"choices": told},
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body(choices) | ({"usage": usage} if self.has_usage else {})

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(kw_only=True)
class ChatForm(_Form):
    """Answers to /v1/chat/completions."""

    has_tools: bool = False
    has_thoughts: bool = True  # whether thoughts are sent
    is_stream: bool = False

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Pieces of a stream for an event of the answer `index`, a role in the first."""
        choice = self.choices[index]
        self._note(choice, event)
        chunks = []
        if not choice.has_begun:
            choice.has_begun = True
            chunks.append(self._delta(index, {"role": "assistant", "content": ""}))
        if isinstance(event, Text) and event.phase == TOOL_CALL:
            choice.call.append(event.text)
        elif isinstance(event, Text):
            chunks += self._text(index, event.phase, event.text, event.tokens)
        elif isinstance(event, Ended) and event.phase == TOOL_CALL:
            chunks += self._call(index)
        elif isinstance(event, Finished):
            if choice.calls and choice.reason == "stop":
                choice.reason = "tool_calls"
            chunks.append(self._ended(index, "delta"))
        return chunks

    def body(self) -> dict[str, Any]:
        """Everything at once, after the events of all answers went through `chunks`."""
        choices = []
        for index, choice in enumerate(self.choices):
            thoughts, content = choice.text("reasoning"), choice.text("content")
            message: dict[str, Any] = {"role": "assistant", "content": content or (None if choice.calls else "")}
            message |= {"refusal": None}
            if thoughts:
                message |= {"reasoning": thoughts, "reasoning_content": thoughts}
            if choice.calls:
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in choice.calls]
            told = {phase: chat_logprobs(tokens) for phase, tokens in choice.tokens.items()}
            logprobs = {"content": told.get(ANSWERING, []) + told.get(TOOL_CALL, [])} if self.has_logprobs else None
            if logprobs is not None and self.has_thoughts and told.get(THINKING):
                logprobs["reasoning"] = told[THINKING]
            stop = choice.finished.stop if choice.finished else ""
            ended = {"finish_reason": choice.reason, "stop_reason": stop or None}
            choices.append({"index": index, "message": message, "logprobs": logprobs, **ended})
        return self._whole(choices)

    def _text(self, index: int, phase: str, text: str, tokens: Sequence[Token] = ()) -> list[dict[str, Any]]:
        if phase == THINKING and not self.has_thoughts:
            return []
        key = "reasoning" if phase == THINKING else "content"
        self.choices[index].said.setdefault(key, []).append(text)
        logprobs = {key: chat_logprobs(tokens)} if self.has_logprobs else None
        return [self._delta(index, {"reasoning": text, "reasoning_content": text} if key == "reasoning"
                            else {"content": text}, logprobs)]  # fmt: skip

    def _call(self, index: int) -> list[dict[str, Any]]:
        choice = self.choices[index]
        text, choice.call = "".join(choice.call), []
        calls = parse_calls(text) if self.has_tools else None
        if calls is None:
            return self._text(index, ANSWERING, self.tags.tool_open + text + self.tags.tool_close)
        first = len(choice.calls)
        made = [
            {
                "index": first + i,
                "id": f"call_{self.id[:12]}{index}_{first + i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
        choice.calls += made
        return [self._delta(index, {"tool_calls": made})]

    def _delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}])

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_stream else "chat.completion"
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model,
                "choices": choices}  # fmt: skip


@dataclass(kw_only=True)
class CompletionForm(_Form):
    """Answers to /v1/completions."""

    is_open: tuple[bool, ...] = ()  # for each prompt, whether it ends inside thoughts

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Pieces of a stream for an event of the answer `index`."""
        choice = self.choices[index]
        text, tokens = "", ()
        if isinstance(event, Started):
            text = self._opening(index, choice, event.phase)
        elif isinstance(event, Ended):
            text = self.tags.tool_close if event.phase == TOOL_CALL else ""
        elif isinstance(event, Text):
            text, tokens = event.text, event.tokens
        self._note(choice, event)
        if isinstance(event, Finished):
            return [self._ended(index, "text")]
        if not text:
            return []
        logprobs = completion_logprobs(tokens, choice.num_letters) if self.has_logprobs else None
        choice.num_letters += len(text)
        choice.said.setdefault("text", []).append(text)
        return [self._chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}])]

    def body(self) -> dict[str, Any]:
        """Everything at once, after the events of all answers went through `chunks`."""
        choices = []
        for index, choice in enumerate(self.choices):
            tokens = [token for tokens in choice.tokens.values() for token in tokens]
            logprobs = completion_logprobs(tokens) if self.has_logprobs else None
            stop = choice.finished.stop if choice.finished else ""
            ended = {"finish_reason": choice.reason, "stop_reason": stop or None}
            choices.append({"index": index, "text": choice.text("text"), "logprobs": logprobs, **ended})
        return self._whole(choices)

    def _opening(self, index: int, choice: Choice, phase: str) -> str:
        """The tags between the phase before and this one."""
        is_first = not choice.before
        is_open = bool(self.is_open) and self.is_open[index % self.num_prompts]
        close = self.tags.close if choice.before == THINKING and phase == ANSWERING else ""
        if is_first and is_open and phase == ANSWERING:
            close = self.tags.close  # thoughts of no token
        opens = {THINKING: "" if is_first and is_open else self.tags.open, TOOL_CALL: self.tags.tool_open}
        return close + opens.get(phase, "")

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model,
                "choices": choices}  # fmt: skip


def parse_calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments, as JSON, of the calls in a tool call's text: an object with `name` and `arguments` (or
    `parameters`), or a list of them. None if it is neither."""
    try:
        told = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    calls = []
    for call in told if isinstance(told, list) else [told]:
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append((call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    # Half of a surrogate pair can be spelled in JSON, and cannot be sent.
    is_text = all(ord(letter) not in SURROGATES for call in calls for letter in "".join(call))
    return calls if calls and is_text else None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def chat_logprobs(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """The logprobs of /v1/chat/completions."""

    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}

    return [
        one(token.text, token.logprob) | {"top_logprobs": [one(text, logprob) for _, text, logprob in token.top]}
        for token in tokens
        if token.logprob is not None
    ]


def completion_logprobs(tokens: Sequence[Token], offset: int = 0) -> dict[str, list[Any]]:
    """The logprobs of /v1/completions. offset: letters before the first token."""
    known = [token for token in tokens if token.logprob is not None]
    offsets = []
    for token in known:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in known],
        "token_logprobs": [token.logprob for token in known],
        "top_logprobs": [{text: logprob for _, text, logprob in token.top} for token in known],
        "text_offset": offsets,
    }
