"""The routes: OpenAI's, health, metrics and the page. What a request means is read in nestling/openai.py; how many are
admitted is the guard's and the runtime's to say; how answers reach the client stands in delivery.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nestling.request import Full, Request, Runtime, Stream, TooLong
from nestling.serve.body import read_object
from nestling.serve.delivery import Hall
from nestling.serve.guard import Guard
from nestling.serve.metrics import CONTENT_TYPE, Metrics
from nestling.serve.models import Models
from nestling.serve.refusals import Refused, error_response
from nestling.serve.settings import ServeSettings

# The page is one file that loads nothing: what a model says is text in it, and could not be more.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class App:
    """A server's parts; `guard` is what uvicorn runs."""

    guard: Guard
    hall: Hall
    models: Models
    metrics: Metrics


def make_app(runtime: Runtime, settings: ServeSettings, *, nest: str) -> App:
    """The server for a runtime. nest: what the nest is called where the settings do not say."""
    made = FastAPI(title="Nestling", docs_url=None, redoc_url=None)
    models = Models(runtime, settings, nest=nest, created=int(time.time()))
    metrics = Metrics(runtime, name=models.name)
    hall = Hall(metrics, write_timeout=settings.write_timeout)
    page = (resources.files("nestling") / "assets" / "page.html").read_bytes()

    async def told(request: HttpRequest) -> dict[str, Any]:
        return await read_object(request, max_bytes=settings.max_body, seconds=settings.read_timeout)

    @made.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @made.get("/health")
    async def get_health() -> Response:
        return JSONResponse({"status": "ok"})

    @made.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    @made.get("/v1/models")
    async def get_models() -> Response:
        return JSONResponse(models.listing())

    @made.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return JSONResponse(models.entry(model))

    @made.exception_handler(Refused)
    async def refuse(request: HttpRequest, error: Refused) -> Response:
        metrics.refuse(error.status)
        return error_response(error.status, error.message, param=error.param, code=error.code)

    @made.exception_handler(HTTPException)
    async def complain(request: HttpRequest, error: HTTPException) -> Response:
        message = {
            404: f"there is nothing at {request.url.path[:200]}. Paths: {', '.join(paths)}.",
            405: f"{request.method} is not for {request.url.path[:200]}.",
        }.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, headers=dict(error.headers or {}))

    paths = sorted(route.path for route in made.routes if isinstance(route, Route))
    guard = Guard(made, key=settings.key(), max_requests=settings.max_requests, count=metrics.refuse)
    return App(guard, hall, models, metrics)


async def _submit(runtime: Runtime, requests: Sequence[Request]) -> list[Stream]:
    """Begin answers, all or none; Refused for what cannot be."""
    streams: list[Stream] = []
    try:
        for request in requests:
            # In a thread: reading a long prompt takes as long as many tokens of others.
            streams.append(await asyncio.to_thread(runtime.submit, request))
    except BaseException as error:
        for stream in streams:
            stream.cancel()
        if isinstance(error, Full):
            raise Refused(429, str(error)) from None
        if isinstance(error, TooLong):
            raise Refused(413, str(error), code="context_length_exceeded") from None
        if isinstance(error, ValueError):
            raise Refused(400, str(error)) from None
        raise
    return streams
