"""One document of a JSONL file as token ids: plain text, a prompt with its completion, or a chat.

Messages pass through the tokenizer's chat template, thoughts under whatever name the template reads. Every document
ends with the tokenizer's eos.
"""

from __future__ import annotations

from typing import Any

Tokenizer = Any  # a transformers tokenizer: called on text, `eos_token_id`, `apply_chat_template`
REASONING = ("reasoning_content", "reasoning", "thinking")  # how data sets and templates spell an assistant's thoughts
EXPECTED = "one of `text`, `prompt` with `completion`, or `messages`"


def encode(document: Any, tokenizer: Tokenizer) -> list[int]:
    """Token ids of one document, ending with one eos; empty when the document has no text."""
    if not isinstance(document, dict):
        raise ValueError(f"expected an object with {EXPECTED}, got {type(document).__name__}.")
    formats = {"text": ("text",), "prompt": ("prompt", "completion"), "messages": ("messages",)}
    found = [name for name, keys in formats.items() if any(key in document for key in keys)]
    if len(found) != 1:
        raise ValueError(
            f"expected {EXPECTED}, and only one of them; got the keys {', '.join(map(repr, document)) or 'none'}."
        )
    if found == ["messages"]:
        text = _render(document["messages"], document.get("tools"), tokenizer)
    else:
        text = "".join(_string(document, key) for key in formats[found[0]])
    if not text.strip():
        return []
    # a chat template writes its own special tokens; plain text gets those that the tokenizer adds
    ids = list(tokenizer(text, add_special_tokens=found != ["messages"], verbose=False)["input_ids"])
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def prompt_length(document: dict[str, Any], ids: list[int], tokenizer: Tokenizer) -> int:
    """How many tokens of a document are its prompt: all that stands before the completion or the last reply."""
    if "text" in document:
        return 1
    if "prompt" in document:
        start = tokenizer(document["prompt"], verbose=False)["input_ids"]
    else:
        *before, last = document["messages"]
        if last["role"] != "assistant":
            return len(ids)
        text = _apply(before, document.get("tools"), tokenizer, add_generation_prompt=True)
        start = tokenizer(text, add_special_tokens=False)["input_ids"]
    # A tokenizer may merge across the border: only what both have in common is surely prompt.
    return next((i for i, (a, b) in enumerate(zip(start, ids, strict=False)) if a != b), min(len(start), len(ids)))


def _string(document: dict[str, Any], key: str) -> str:
    if key not in document:
        raise ValueError(f"`{key}` is missing; expected {EXPECTED}.")
    if not isinstance(document[key], str):
        raise ValueError(f"`{key}` is {type(document[key]).__name__}; expected a string.")
    return document[key]


def _render(messages: Any, tools: Any, tokenizer: Tokenizer) -> str:
    """The chat as the template writes it, without what the template puts after a final eos."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("`messages` is not a list of objects with `role` and `content`.")
    if not messages:
        return ""
    if not tokenizer.chat_template:
        raise ValueError(
            "`messages` need a chat template, and this tokenizer has none: set tokenizer.chat_template, or use `text`."
        )
    text = _apply(messages, tools, tokenizer)
    return text.rstrip() if text.rstrip().endswith(tokenizer.eos_token) else text


def _apply(messages: Any, tools: Any, tokenizer: Tokenizer, **options: Any) -> str:
    template = tokenizer.get_chat_template(tools=tools)
    spelled = [_spell_reasoning(message, template) for message in messages]
    return tokenizer.apply_chat_template(spelled, tools=tools, tokenize=False, **options)


def _spell_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with its thoughts under every spelling, so that the template finds the one that it reads."""
    thoughts = {name: message[name] for name in REASONING if message.get(name)}
    if not thoughts:
        return message
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{' and '.join(thoughts)} differ; expected one of {', '.join(REASONING)}.")
    if not any(name in template for name in REASONING):
        raise ValueError(
            f"the chat template reads none of {', '.join(REASONING)}, so `{next(iter(thoughts))}` would be lost: "
            "use a template that writes it, or put the thoughts into `content`."
        )
    return message | dict.fromkeys(REASONING, next(iter(thoughts.values())))
