"""Another engine behind a URL: vLLM, SGLang, llama.cpp, Nestling, or whatever speaks OpenAI's API.

What differs between them stands in `KINDS` and in the methods here: how text is asked for with its tags in it, where
the chat template is to be had, how a text is counted. A call is tried again while nothing of it has come: when the
engine cannot be reached, and when it says 429 or 503, after the time that it names. Once text has come, an end that
is not an end is a `Broken`: nobody takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from nestling.sampling import Sampling
from nestling.template import Template
from nestling.think import Tags

NO_TAGS = Tags()
MAX_LINE = 16 * 2**20  # bytes of one event of a stream
BUSY = (429, 503)
# What /v1/models says in `owned_by`, and what a request needs so that tags are in the text.
KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "nestling": "nestling"}


@dataclass(frozen=True, kw_only=True)
class UpstreamSettings:
    """How other engines are called."""

    key: str = ""  # sent to the other engines as a bearer token
    connect_timeout: float = 5.0  # seconds until a connection must be there
    read_timeout: float = 120.0  # seconds between two pieces of an answer, and before its first
    retries: int = 4  # times that a call is tried again before anything of it has come
    backoff: float = 0.25  # seconds before the first new try, doubled each time
    max_wait: float = 10.0  # seconds that a busy engine may ask to wait, at most


class Broken(RuntimeError):
    """An engine could not be reached, refused, or broke off."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an answer."""

    text: str = ""
    thoughts: str = ""  # of engines that tell them apart
    reason: str = ""  # why the answer ended, in the last piece: stop or length
    stop: str = ""  # the stop string that ended it, where it is told
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is asked of an engine: a continuation of `prompt`, or the next answer to `messages`."""

    prompt: str | tuple[int, ...] = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    continues: bool = False  # the last message is an answer that has begun
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    tags: Tags = NO_TAGS  # that must be in the text
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, for messages


@dataclass
class Upstream:
    """One engine. `open` asks it what it is; to be used in one event loop, and closed."""

    url: str
    model: str = ""
    settings: UpstreamSettings = UpstreamSettings()
    kind: str = ""
    client: httpx.AsyncClient = field(init=False, repr=False)
    counts: dict[str, int | None] = field(default_factory=dict, repr=False)  # of texts that were counted

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.settings.key}"} if self.settings.key else {}
        timeout = httpx.Timeout(self.settings.read_timeout, connect=self.settings.connect_timeout)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        # Not by the environment's proxies: these engines are named by whoever runs the server.
        self.client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)

    @property
    def base(self) -> str:
        """The URL without /v1."""
        return self.url.removesuffix("/v1")

    async def open(self) -> None:
        """Find out what kind of engine it is and, if it was not said, which model."""
        listed = (await self._json("GET", "/v1/models")).get("data") or [{}]
        found = next((one for one in listed if one.get("id") == self.model), listed[0])
        self.kind = KINDS.get(str(found.get("owned_by", "")), "")
        self.model = self.model or str(found.get("id", ""))

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()

    async def template(self) -> Template | None:
        """The model's chat template, if the engine tells it."""
        if self.kind not in ("llamacpp", "nestling"):
            return None
        told = await self._json("GET", "/props")
        special = {name: told.get(name) or "" for name in ("bos_token", "eos_token")}
        return Template(told["chat_template"], special=special) if told.get("chat_template") else None

    async def prompt(self, messages: tuple[Mapping[str, Any], ...]) -> str | None:
        """The prompt that the engine's own template makes, if it tells."""
        if self.kind == "vllm":
            asked = {"model": self.model, "messages": [*messages], "add_generation_prompt": True}
            tokens = (await self._json("POST", "/tokenize", asked))["tokens"]
            return (await self._json("POST", "/detokenize", {"model": self.model, "tokens": tokens}))["prompt"]
        return None

    async def tokens(self, text: str) -> list[int] | None:
        """The tokens of a text, special ones read as such and none added, if the engine tells."""
        if self.kind == "llamacpp":
            asked: dict[str, Any] = {"content": text, "add_special": False, "parse_special": True}
        elif self.kind == "vllm":
            asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        else:
            return None
        return (await self._json("POST", "/tokenize", asked))["tokens"]

    async def count(self, text: str) -> int | None:
        """The number of tokens of a short text, if the engine tells; asked once."""
        if text not in self.counts:
            tokens = await self.tokens(text)
            self.counts[text] = None if tokens is None else len(tokens)
        return self.counts[text]

    async def stream(self, call: Call) -> AsyncGenerator[Piece]:
        """The answer to a call, piece by piece, the last with a reason. ValueError for what this engine cannot do;
        Broken."""
        path, body = await self._body(call)
        reason = ""
        if isinstance(body.get("prompt"), list):
            yield Piece(prompt_tokens=len(body["prompt"]))
        async with contextlib.aclosing(self._events(path, body)) as events:
            async for told in events:
                piece = read_piece(told)
                reason = piece.reason or reason
                yield piece
        if not reason:
            raise Broken(f"{self.url} broke off in the middle of its answer.")

    async def _body(self, call: Call) -> tuple[str, dict[str, Any]]:
        sampling = call.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": call.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        extra = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": list(call.stop)}
        body |= {name: value for name, value in extra.items() if value}
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if call.stop_tokens:
            if self.kind == "llamacpp":
                raise ValueError("stop_token_ids: llama.cpp does not know them. Use `stop`.")
            body["stop_token_ids"] = list(call.stop_tokens)
        tags = [tag for tag in (call.tags.open, call.tags.close, call.tags.tool_open, call.tags.tool_close) if tag]
        if tags and self.kind in ("vllm", "sglang"):
            body["skip_special_tokens"] = False
        if tags and self.kind == "llamacpp":
            body["preserved_tokens"] = tags
        if call.messages:
            body["messages"] = [*call.messages]
            if call.options and self.kind:
                body["chat_template_kwargs"] = dict(call.options)
            if call.continues and self.kind in ("vllm", "sglang"):
                body |= {"add_generation_prompt": False, "continue_final_message": True}
            return "/v1/chat/completions", body
        prompt: Any = call.prompt
        if isinstance(prompt, str):
            if self.kind == "llamacpp":  # as tokens, or it would put a second beginning of text before it
                prompt = await self.tokens(prompt)
            elif self.kind == "vllm":
                body["add_special_tokens"] = False
        return "/v1/completions", body | {"prompt": prompt if isinstance(prompt, str) else list(prompt or ())}

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The objects of a stream up to [DONE] or its end."""
        response = await self._send("POST", path, body)
        decoder = SseDecoder()
        try:
            async for data in response.aiter_bytes():
                for line in decoder.add(data):
                    if line == "[DONE]":
                        return
                    yield _object(line, self.url)
        except httpx.TimeoutException:
            raise Broken(f"{self.url} sent nothing for {self.settings.read_timeout:g} seconds.", 504) from None
        except httpx.HTTPError as error:
            raise Broken(f"{self.url} broke off in the middle of its answer: {_reason(error)}.") from None
        finally:
            await response.aclose()

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self._send(method, path, body)
        try:
            return _object((await response.aread()).decode("utf-8", "replace"), self.url)
        except httpx.HTTPError as error:
            raise Broken(f"{self.url} broke off in the middle of {path}: {_reason(error)}.") from None
        finally:
            await response.aclose()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """A response with status 200, its body unread; tried again as the settings say."""
        for i in range(self.settings.retries + 1):
            is_last = i == self.settings.retries
            wait = min(self.settings.backoff * 2**i, self.settings.max_wait)
            try:
                request = self.client.build_request(method, self.base + path, json=body)
                response = await self.client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if is_last:
                    raise Broken(f"{self.url} cannot be reached: {_reason(error)}.", 503) from None
            except httpx.TimeoutException:
                raise Broken(f"{self.url} sent nothing for {self.settings.read_timeout:g} seconds.", 504) from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise Broken(f"{self.url}: {_reason(error)}.") from None
            else:
                if response.status_code == 200:
                    return response
                if response.status_code not in BUSY or is_last:
                    raise await self._refusal(response)
                await response.aclose()
                wait = min(_retry_after(response) or wait, self.settings.max_wait)
            await asyncio.sleep(wait)
        raise AssertionError

    async def _refusal(self, response: httpx.Response) -> Broken:
        """What an engine said that will not answer. That it will not take the request is the client's to know."""
        try:
            text = (await response.aread())[:10_000].decode("utf-8", "replace")
        except httpx.HTTPError as error:
            text = _reason(error)
        finally:
            await response.aclose()
        status = response.status_code
        is_passed = status in (400, 413, 422, *BUSY)
        return Broken(f"{self.url} answers {status}: {_message(text)}", status if is_passed else 502)


def parse_url(text: str) -> tuple[str, str]:
    """URL and model of `URL[#model]`."""
    url, _, model = text.partition("#")
    try:
        known = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"'{url[:200]}' is no URL: {error}.") from None
    if known.scheme not in ("http", "https") or not known.host or any(letter.isspace() for letter in url):
        raise ValueError(f"'{url[:200]}' is no URL of an engine: expected http://HOST:PORT[/v1][#MODEL].")
    return url.rstrip("/"), model


def read_piece(told: Mapping[str, Any]) -> Piece:
    """A chunk of either endpoint. Broken if it is an error or no chunk."""
    if told.get("error"):
        raise Broken(f"the engine broke off: {_message(json.dumps(told))}")
    usage = told.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    counts = {name: value for name, value in counts.items() if type(value) is int}
    choices = told.get("choices")
    if not isinstance(choices, list):
        raise Broken("the engine sent something that is no piece of an answer.")
    choice = choices[0] if choices and isinstance(choices[0], Mapping) else {}
    delta = choice.get("delta")
    delta = delta if isinstance(delta, Mapping) else {}
    stop = choice.get("stop_reason")
    reason = choice.get("finish_reason")
    return Piece(
        text=_clean(choice.get("text") or delta.get("content")),
        thoughts=_clean(delta.get("reasoning_content") or delta.get("reasoning")),
        reason="" if not reason else "length" if reason == "length" else "stop",
        stop=_clean(stop),
        **counts,
    )


class SseDecoder:
    """Server-sent events from bytes, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def add(self, data: bytes) -> list[str]:
        """The data of the events that are now whole."""
        events = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MAX_LINE:
            raise Broken("the engine sent an endless event.")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


def _clean(text: Any) -> str:
    """Text that can be sent on: without halves of surrogate pairs, which JSON can spell."""
    return text.encode("utf-8", "replace").decode("utf-8") if isinstance(text, str) else ""


def _object(text: str, url: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise Broken(f"{url} sent something that is no JSON object: {text[:100]!r}.")
    return told


def _message(text: str) -> str:
    """The message in an error's body."""
    try:
        told = json.loads(text)
        error = told.get("error", told)
        return str(error.get("message", error))[:500] if isinstance(error, dict) else str(error)[:500]
    except (ValueError, AttributeError, RecursionError):
        return text[:500]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _retry_after(response: httpx.Response) -> float:
    told = response.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else 0.0
