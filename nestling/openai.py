"""Requests of OpenAI's clients: what each field of /v1/chat/completions and /v1/completions means here.

A field that would change the answer is understood or refused, never dropped: the fields below are understood, those of
NEUTRAL only with the value that changes nothing, those of IGNORED never change an answer, and any other is an error
that names the nearest known one. Thinking budgets come in the spellings of thinking_budget.py, members in `elastic`
or in the model's id.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nestling import thinking_budget
from nestling.policy import Policy
from nestling.replies import ChatForm, CompletionForm
from nestling.request import Request
from nestling.sampling import Sampling
from nestling.template import NO_THINKING, THINKING, Template

MAX_STOPS, MAX_STOP = 64, 1024  # stop strings in a request, letters in one
MAX_LOGPROBS = 20
MAX_CLOSING = 2000  # letters of a closing sentence
ELASTIC = ("think", "answer", "handover", "replay", "answer_reserve", "closing", "thinking_token_budget")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "priority", "request_id", "cache_prompt", "cache_salt",
)  # fmt: skip
# Field -> values that change nothing. Missing and null change nothing either.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "prompt_logprobs": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
}

Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class StreamOptions(_Wire):
    """Options of a stream."""

    include_usage: bool | None = None
    """Whether a last chunk tells the tokens."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is padded."""


class _Common(_Wire):
    model: str = ""
    """The nest, one of its members, or who thinks and who answers: `name:think->answer`."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    """Tokens of thoughts and answer together."""
    n: Positive | None = None
    """Answers to each prompt; with a seed, each has the next one."""
    temperature: float | None = None
    """0 is the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    """-1 and 0 are all tokens."""
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    """Strings that end the answer; thoughts are not searched."""
    stop_token_ids: list[int] | None = None
    """Tokens that end it."""
    elastic: dict[str, Any] | None = None
    """think, answer: members. handover: prefill, shadow or replay. replay: tokens. answer_reserve: tokens of max_tokens
    that thinking cannot take. closing: sentence before a forced end of thoughts. thinking_token_budget: as below."""
    thinking_token_budget: int | None = None
    """Tokens of thinking at most; 0 is none. The fields that follow are other servers' spellings of it."""
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget: int | None = None
    max_thinking_tokens: int | None = None
    reasoning_max_tokens: int | None = None
    custom_params: dict[str, Any] | None = None
    nvext: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high (0, 0.1, 0.2, 0.5, 0.8 of max_tokens), xhigh, max: as much as fits."""
    enable_thinking: bool | None = None
    """Whether there are thoughts."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Options of the chat template."""


class ChatRequest(_Common):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """role, content (a string or a list of text parts), reasoning, tool_calls, tool_call_id, name."""
    max_completion_tokens: Positive | None = None
    """As max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    """auto or none."""
    include_reasoning: bool | None = None
    """false: thoughts are made and not sent."""


class CompletionRequest(_Common):
    """The body of POST /v1/completions: a bare continuation, unless a budget, `elastic` or two members are asked for;
    then the text has the thoughts, their closing tag and the answer."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    """Text or token ids, or several of one kind. Special tokens are read as such and none is added."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server answers with."""

    template: Template
    find: Callable[[str], Policy]  # the policy that a model's id stands for; raises for one that there is not
    max_tokens: int = 1024  # where a request does not say
    max_choices: int = 8  # answers that one request may ask for
    sampling: Sampling = Sampling()  # where a request does not say


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as the runtime takes it, and how its answers go back."""

    requests: tuple[Request, ...]
    form: ChatForm | CompletionForm
    is_stream: bool


def read_chat(body: Mapping[str, Any], served: Served) -> Asked:
    """A chat. ValueError says which field cannot be done."""
    told = _read(ChatRequest, body)
    _check_names(told)
    thinks = thinking_budget.find(body)
    if told.top_logprobs and not told.logprobs:
        raise ValueError("top_logprobs needs logprobs: true.")
    if told.max_tokens and told.max_completion_tokens and told.max_tokens != told.max_completion_tokens:
        raise ValueError(
            f"max_tokens ({told.max_tokens}) and max_completion_tokens ({told.max_completion_tokens}) disagree."
        )
    max_tokens = told.max_completion_tokens or told.max_tokens or served.max_tokens
    tools = _tools(told, served.template)
    messages = tuple(_message(message, i) for i, message in enumerate(told.messages))
    options = _options(told, thinks, served.template)
    request = Request(
        prompt=served.template.render(messages, tools=tools, options=options),
        max_tokens=max_tokens,
        policy=_policy(told, thinks, served, max_tokens),
        sampling=_sampling(told, served),
        stop=_stops(told),
        stop_tokens=tuple(told.stop_token_ids or ()),
        logprobs=(told.top_logprobs or 0) if told.logprobs else None,
        messages=messages,
    )
    requests = _choices((request,), told, served)
    hides = told.include_reasoning is False or (told.reasoning or {}).get("exclude") is True
    form = ChatForm(
        model=told.model,
        tags=served.template.tags,
        num_choices=len(requests),
        has_usage=_has_usage(told),
        has_logprobs=bool(told.logprobs),
        has_tools=bool(tools),
        has_thoughts=not hides,
        is_stream=bool(told.stream),
    )
    return Asked(requests=requests, form=form, is_stream=bool(told.stream))


def read_completion(body: Mapping[str, Any], served: Served) -> Asked:
    """A continuation of one or several prompts. ValueError says which field cannot be done."""
    told = _read(CompletionRequest, body)
    _check_names(told)
    thinks = thinking_budget.find(body)
    if told.chat_template_kwargs and set(told.chat_template_kwargs) - _budget_options():
        raise ValueError("chat_template_kwargs: a prompt goes through no template. Use /v1/chat/completions.")
    max_tokens = told.max_tokens or served.max_tokens
    policy = _policy(told, thinks, served, max_tokens)
    # As long as nothing is asked about thinking, tags are text, as they are anywhere else.
    is_elastic = told.elastic is not None or thinks.says or policy.think != policy.answer
    request = Request(
        prompt="",
        max_tokens=max_tokens,
        policy=policy,
        sampling=_sampling(told, served),
        stop=_stops(told),
        stop_tokens=tuple(told.stop_token_ids or ()),
        logprobs=told.logprobs,
        is_plain=not is_elastic,
    )
    prompts = _prompts(told.prompt)
    requests = _choices(tuple(replace(request, prompt=prompt) for prompt in prompts), told, served)
    form = CompletionForm(
        model=told.model,
        tags=served.template.tags if is_elastic else type(served.template.tags)(),
        num_choices=len(requests),
        num_prompts=len(prompts),
        has_usage=_has_usage(told),
        has_logprobs=told.logprobs is not None,
        is_open=tuple(isinstance(prompt, str) and served.template.is_open(prompt) for prompt in prompts),
    )
    return Asked(requests=requests, form=form, is_stream=bool(told.stream))


def _read(kind: type[Any], body: Mapping[str, Any]) -> Any:
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        # A field of several types has an error for each: the deepest is about the type that was meant.
        found = error.errors(include_url=False, include_context=False, include_input=False)
        worst = max(found, key=lambda one: len(one["loc"]))
        where = ".".join(str(part) for part in worst["loc"] if not str(part).startswith(("list[", "constrained-")))
        raise ValueError(f"{where}: {worst['msg'][:200]}.") from None


def _check_names(told: _Common) -> None:
    """Refuse what would change the answer and is not understood."""
    known = {*type(told).model_fields, *NEUTRAL, *IGNORED}
    for name, value in (told.model_extra or {}).items():
        if name in IGNORED or value is None:
            continue
        if name in NEUTRAL:
            if not any(_is_same(value, one) for one in NEUTRAL[name]):
                expected = " or ".join(json.dumps(one) for one in NEUTRAL[name]) or "null"
                raise ValueError(f"{name} is not supported: leave it out, or send {expected}.")
            continue
        if thinking_budget.sounds_like_one(name):
            spelled = ", ".join((*thinking_budget.NUMBERS, *thinking_budget.SWITCHES, *thinking_budget.EFFORTS))
            raise ValueError(f"'{name[:60]}' is not known as a thinking budget. Known: {spelled}.")
        near = difflib.get_close_matches(name[:60], known, 1)
        raise ValueError(f"there is no field '{name[:60]}'." + (f" Did you mean '{near[0]}'?" if near else ""))


def _is_same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1, but 1 is 1.0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _policy(told: _Common, thinks: thinking_budget.Asked, served: Served, max_tokens: int) -> Policy:
    """What the model's id and `elastic` say, together."""
    policy, usual = served.find(told.model), served.find("")
    elastic = {name: value for name, value in (told.elastic or {}).items() if value is not None}
    for name, value in elastic.items():
        if name not in ELASTIC:
            raise ValueError(f"there is no 'elastic.{name[:60]}'. Known: {', '.join(ELASTIC)}.")
        kind = int if name in ("replay", "answer_reserve", "thinking_token_budget") else str
        if type(value) is not kind:
            raise ValueError(
                f"elastic.{name} is {str(value)[:60]!r}: expected {'a number' if kind is int else 'text'}."
            )
    for name in ("think", "answer"):
        by_id = getattr(policy, name)
        if name in elastic and by_id != getattr(usual, name) and elastic[name] != by_id:
            raise ValueError(f"model ('{told.model[:60]}') and elastic.{name} ('{elastic[name][:60]}') disagree.")
    if len(elastic.get("closing", "")) > MAX_CLOSING:
        raise ValueError(f"elastic.closing has more than {MAX_CLOSING} letters.")
    elastic.pop("thinking_token_budget", None)  # read with its other spellings
    if thinks.says:
        elastic["thinking_token_budget"] = thinks.budget(max_tokens)
    assert {one.name for one in fields(Policy)} >= set(elastic)
    return replace(policy, **elastic)


def _sampling(told: _Common, served: Served) -> Sampling:
    given = {name: getattr(told, name) for name in ("temperature", "top_p", "min_p", "seed")}
    if told.top_k is not None:
        given["top_k"] = 0 if told.top_k == -1 else told.top_k
    sampling = replace(served.sampling, **{name: value for name, value in given.items() if value is not None})
    sampling.check()
    return sampling


def _stops(told: _Common) -> tuple[str, ...]:
    stops = (told.stop,) if isinstance(told.stop, str) else tuple(told.stop or ())
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop: {len(stops)} strings, at most {MAX_STOPS} are searched for.")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP:
            raise ValueError(f"stop: a string of {len(stop)} letters; expected 1 to {MAX_STOP}.")
    return stops


def _choices(requests: tuple[Request, ...], told: _Common, served: Served) -> tuple[Request, ...]:
    """The requests, each as often as `n` says."""
    n = told.n or 1
    if n * len(requests) > served.max_choices:
        raise ValueError(f"{n * len(requests)} answers are asked for at once, at most {served.max_choices} are made.")
    made = []
    for i in range(n):
        for request in requests:
            seed = request.sampling.seed
            sampling = request.sampling if seed is None else replace(request.sampling, seed=seed + i)
            sampling.check()
            made.append(replace(request, sampling=sampling))
    return tuple(made)


def _prompts(prompt: Any) -> list[str | tuple[int, ...]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [one if isinstance(one, str) else tuple(one) for one in prompt]


def _message(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages[{i}].role is {str(role)[:60]!r}: expected one of {', '.join(ROLES)}.")
    return {**message, "role": "system" if role == "developer" else role}


def _tools(told: ChatRequest, template: Template) -> list[dict[str, Any]]:
    if told.tool_choice not in (None, "auto", "none"):
        raise ValueError("tool_choice: only 'auto' and 'none' are supported.")
    if not told.tools or told.tool_choice == "none":
        return []
    if not template.reads("tools"):
        raise ValueError("tools: the model's chat template does not tell it of tools.")
    for i, tool in enumerate(told.tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ValueError(f"tools[{i}]: expected type 'function' and a function with a name.")
    return told.tools


def _options(told: _Common, thinks: thinking_budget.Asked, template: Template) -> dict[str, Any]:
    """What the template is told besides messages and tools."""
    given = told.chat_template_kwargs or {}
    for name in given:
        if name not in _budget_options() and thinking_budget.sounds_like_one(name) and not template.reads(name):
            raise ValueError(f"chat_template_kwargs: the model's chat template does not read '{name[:60]}'.")
    effort = {"reasoning_effort": thinks.effort} if thinks.effort else {}
    is_off = (thinks.is_set and thinks.tokens == 0) or thinks.effort == "none"
    return (NO_THINKING if is_off else THINKING if thinks.is_on else {}) | effort | given


def _budget_options() -> set[str]:
    """Options of templates that are read as budgets."""
    known = (*thinking_budget.NUMBERS, *thinking_budget.SWITCHES, *thinking_budget.EFFORTS)
    return {name.partition(".")[2] for name in known if name.startswith("chat_template_kwargs.")}


def _has_usage(told: _Common) -> bool:
    return bool(told.stream and told.stream_options and told.stream_options.include_usage)
