"""The routes: OpenAI's, health, metrics and the page. What a request means is read in nestling/openai.py; how many are
admitted is the guard's and the runtime's to say; how answers reach the client stands in delivery.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestling.openai import Asked, ChatRequest, CompletionRequest, Served, read_chat, read_completion
from nestling.request import Full, Request, Runtime, Stream, TooLong
from nestling.serve.body import read_object
from nestling.serve.delivery import Delivery, Hall
from nestling.serve.guard import Guard
from nestling.serve.metrics import CONTENT_TYPE, Metrics
from nestling.serve.models import Models
from nestling.serve.refusals import Refused, error_response
from nestling.serve.settings import ServeSettings
from nestling.template import Template

# The page is one file that loads nothing: what a model says is text in it, and could not be more.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


Read = Callable[[Mapping[str, Any], Served], Asked]


class Servable(Runtime, Protocol):
    """A runtime whose prompts can be made from messages."""

    @property
    def template(self) -> Template:
        """The model's own."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A runtime that knows how long prompts may be: the engine."""

    @property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...


@dataclass(frozen=True)
class App:
    """A server's parts; `guard` is what uvicorn runs."""

    guard: Guard
    hall: Hall
    models: Models
    metrics: Metrics


def make_app(runtime: Servable, settings: ServeSettings, *, nest: str) -> App:
    """The server for a runtime. nest: what the nest is called where the settings do not say."""
    made = FastAPI(title="Nestling", docs_url=None, redoc_url=None)
    models = Models(runtime, settings, nest=nest, created=int(time.time()))
    metrics = Metrics(runtime, name=models.name)
    hall = Hall(metrics, write_timeout=settings.write_timeout)
    meaning = Served(
        template=runtime.template, find=models.find, max_tokens=settings.max_tokens, max_choices=settings.max_choices
    )
    page = (resources.files("nestling") / "assets" / "page.html").read_bytes()

    @made.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @made.get("/health")
    async def get_health() -> Response:
        return JSONResponse({"status": "ok"})

    @made.get("/props")
    async def get_props() -> Response:
        return JSONResponse(runtime.template.props)

    @made.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    @made.get("/v1/models")
    async def get_models() -> Response:
        return JSONResponse(models.listing())

    @made.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return JSONResponse(models.entry(model))

    @made.post("/v1/chat/completions")
    async def post_chat(request: HttpRequest) -> Response:
        return await answer(request, read_chat)

    @made.post("/v1/completions")
    async def post_completion(request: HttpRequest) -> Response:
        return await answer(request, read_completion)

    async def answer(request: HttpRequest, read: Read) -> Response:
        begun = time.perf_counter()
        body = await read_object(request, max_bytes=settings.max_body, seconds=settings.read_timeout)
        body.setdefault("model", models.name)
        # In a thread: reading a long prompt takes as long as many tokens of others.
        asked, streams = await asyncio.to_thread(_begin, runtime, read, body, meaning)
        return Delivery(hall, streams, asked.form, is_stream=asked.is_stream, begun=begun)

    @made.exception_handler(Refused)
    async def refuse(request: HttpRequest, error: Refused) -> Response:
        metrics.refuse(error.status)
        return error_response(error.status, error.message, param=error.param, code=error.code)

    @made.exception_handler(Exception)
    async def fail(request: HttpRequest, error: Exception) -> Response:
        return error_response(500, "the server failed at this request; its log says why.")

    @made.exception_handler(HTTPException)
    async def complain(request: HttpRequest, error: HTTPException) -> Response:
        message = {
            404: f"there is nothing at {request.url.path[:200]}. Paths: {', '.join(paths)}.",
            405: f"{request.method} is not for {request.url.path[:200]}.",
        }.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, headers=dict(error.headers or {}))

    paths = sorted(route.path for route in made.routes if isinstance(route, Route))
    _document(made)
    guard = Guard(made, key=settings.key(), max_requests=settings.max_requests, count=metrics.refuse)
    return App(guard, hall, models, metrics)


def _begin(runtime: Runtime, read: Read, body: dict[str, Any], meaning: Served) -> tuple[Asked, list[Stream]]:
    """Understand a request and begin its answers, all or none; Refused for what cannot be."""
    streams: list[Stream] = []
    try:
        asked = read(body, meaning)
        is_said = any(body.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
        for request in asked.requests:
            streams.append(runtime.submit(request if is_said else _fitted(runtime, request)))
    except (Full, ValueError) as error:
        for stream in streams:
            stream.cancel()
        status = 429 if isinstance(error, Full) else 413 if isinstance(error, TooLong) else 400
        raise Refused(status, str(error), code="context_length_exceeded" if status == 413 else None) from None
    return asked, streams


def _fitted(runtime: Runtime, request: Request) -> Request:
    """A request that says nothing of its length, no longer than the model's context, where that is known."""
    if not isinstance(runtime, Measured):
        return request
    length = len(runtime.encode(request.prompt)) if isinstance(request.prompt, str) else len(request.prompt)
    return replace(request, max_tokens=max(1, min(request.max_tokens, runtime.context - length)))


def _document(made: FastAPI) -> None:
    """Put what is asked into the OpenAPI document: it is read by hand, so that every refusal is OpenAI's own."""
    told = made.openapi()
    schemas = told.setdefault("components", {}).setdefault("schemas", {})
    for path, kind in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        told["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
