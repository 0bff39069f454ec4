"""Prompts from messages, and where thoughts begin and end in them.

A model's chat template is a program that came with the checkpoint, so it runs in Jinja's sandbox, as transformers runs
it, with what it may write bounded. It gets messages as OpenAI spells them, turned into what templates expect: content
is one string, arguments of tool calls are objects, thoughts stand under every name that templates read. Nothing in a
message is ever opened: a picture, a file or a URL is refused.

The tags are found in the template and among the tokenizer's added tokens, or given by hand (think.py, Tags).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from nestling.request import TooLong
from nestling.think import Tags

MAX_LETTERS = 16 * 2**20  # of a prompt
REASONING = ("reasoning_content", "reasoning", "thinking")  # how clients and templates spell an assistant's thoughts
NO_THINKING = {"enable_thinking": False, "thinking": False}  # options by which templates leave thoughts out
THINKING = {"enable_thinking": True, "thinking": True}
# The template computes with what the client sent: any of these means that it cannot read it.
MISREAD = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # no options: a request has fields for them

# Pairs in use, the commonest first.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
TOOLS = (
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|python_tag|>", ""),
)


class Template:
    """A chat template with its special tokens and tags. Rendering is safe from any thread."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        *,
        special: Mapping[str, str] | None = None,
        added: Collection[str] = (),
        tags: Tags | None = None,
    ) -> None:
        """source: the template, or several by name, of which `default` and `tool_use` are used. special: `bos_token`
        and the like. added: texts of added tokens. tags: instead of those that are found."""
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._source = sources.get("default") or next(iter(sources.values()), "")
        self.special = dict(special or {})
        self.tags = tags or find_tags("".join(sources.values()), added)
        self._compiled = {name: _compile(text) for name, text in sources.items()}
        parse = _environment().parse
        self._variables = {
            name for text in sources.values() for name in jinja2.meta.find_undeclared_variables(parse(text))
        }

    @property
    def props(self) -> dict[str, str]:
        """The template and its special tokens, as llama.cpp's /props tells them, for other servers to make prompts."""
        return {
            "chat_template": self._source,
            **{name: self.special.get(name, "") for name in ("bos_token", "eos_token")},
        }

    @property
    def is_known(self) -> bool:
        """Whether messages can be made into a prompt."""
        return bool(self._compiled)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        is_answered: bool = False,
    ) -> str:
        """The prompt for the next answer to the messages, or for what follows their last answer (`is_answered`).
        options: the template's own, such as NO_THINKING."""
        if not self._compiled:
            raise ValueError("the model has no chat template: send a prompt, not messages.")
        if not messages:
            raise ValueError("messages is empty: expected at least one.")
        for name in options or {}:
            if name in RESERVED or name in self.special:
                raise ValueError(f"chat_template_kwargs: '{name}' cannot be set.")
        compiled = self._compiled.get("tool_use") if tools else None
        compiled = compiled or self._compiled.get("default") or next(iter(self._compiled.values()))
        given = {
            **self.special,
            **(options or {}),
            "messages": [_spelled(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": not is_answered,
        }
        try:
            return _join(compiled.generate(**given))
        except TooLong:
            raise
        # The template computes with what the client sent: any of these means that it cannot read it.
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def reads(self, name: str) -> bool:
        """Whether the template looks at a variable that it is given."""
        return name in self._variables

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends in the opening tag."""
        return bool(self.tags.open) and prompt.rstrip().endswith(self.tags.open)

    def before_thoughts(self, prompt: str) -> str:
        """The prompt up to the opening tag that it ends in: what the next turn's prompt has in common with it."""
        return prompt[: prompt.rindex(self.tags.open)] if self.is_open(prompt) else prompt


def template_of(tokenizer: Any, *, tags: Tags | None = None) -> Template:
    """The template of a transformers tokenizer, from chat_template.jinja or tokenizer_config.json. Tags by hand may
    stand in the latter as `nestling_tags`: {"open": ..., "close": ..., "tool_open": ..., "tool_close": ...}."""
    told = tokenizer.init_kwargs.get("nestling_tags")
    if told is not None and tags is None:
        if not isinstance(told, Mapping) or not set(told) <= {one.name for one in fields(Tags)}:
            raise ValueError(
                f"tokenizer_config.json: nestling_tags is {told!r}: expected open, close, tool_open, tool_close."
            )
        tags = Tags(**told)
    return Template(
        tokenizer.chat_template,
        special=tokenizer.special_tokens_map,
        added=tuple(tokenizer.get_added_vocab()),
        tags=tags,
    )


def find_tags(template: str, added: Collection[str] = ()) -> Tags:
    """The tags that a template or the added tokens name; those that both name come first."""
    open, close = _find(THOUGHTS, template, added)
    tool_open, tool_close = _find(TOOLS, template, added)
    return Tags(open=open, close=close, tool_open=tool_open, tool_close=tool_close)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or parts of text, which are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ValueError(f"{where} is {type(content).__name__}: expected a string or a list of text parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text") or not isinstance(text, str):
            raise ValueError(f"{where}[{i}] is {str(kind)[:40]!r}, not text. Only text is read; nothing is opened.")
        texts.append(text)
    return "\n".join(texts)


def _find(pairs: Sequence[tuple[str, str]], template: str, added: Collection[str]) -> tuple[str, str]:
    """Most named first, then in the order of the list. A template that writes only the closing tag counts."""

    def named(pair: tuple[str, str]) -> int:
        return (pair[0] in added) + ((pair[1] or pair[0]) in template)

    best = max(pairs, key=named)
    return best if named(best) else ("", "")


def _spelled(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of a client as templates read it."""
    spelled = {name: value for name, value in message.items() if value is not None}
    spelled["content"] = text_of(message.get("content"), f"{where}.content")
    thoughts = next((spelled[name] for name in REASONING if spelled.get(name)), None)
    if thoughts is not None:
        spelled |= dict.fromkeys(REASONING, text_of(thoughts, f"{where}.reasoning"))
    if "tool_calls" in spelled:
        spelled["tool_calls"] = [_spelled_call(call, f"{where}.tool_calls") for call in _listed(spelled["tool_calls"])]
    return spelled


def _spelled_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates expect, and not its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}: expected objects with a `function`.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"{where}: the arguments are no JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"tool_calls is {type(value).__name__}: expected a list.")
    return list(value)


def _join(pieces: Iterator[str]) -> str:
    kept, left = [], MAX_LETTERS
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise TooLong(f"the prompt has more than {MAX_LETTERS:,} letters.")
        kept.append(piece)
    return "".join(kept)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no product of a text and a number gets longer than a prompt."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple, bytes))]
        counts = [side for side in (left, right) if isinstance(side, int)]
        is_huge = max(map(abs, counts), default=0) > MAX_LETTERS and operator == "**"
        if is_huge or (sized and counts and sized[0] * counts[0] > MAX_LETTERS):
            raise TooLong(f"the chat template writes more than {MAX_LETTERS:,} letters.")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`generation` blocks mark an assistant's words for training; for a prompt they are just text."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own spelling

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A template's variables that outlive a loop; none with a leading underscore, which could reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no '{name}'.")
        super().__setitem__(name, value)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    names: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    environment.globals.update(names)
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
