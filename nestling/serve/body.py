"""A request's body, read with suspicion: so many bytes in so many seconds, UTF-8, JSON as its standard has it (no NaN
and no infinity), not nested deeper than any request needs.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import Request as HttpRequest

from nestling.serve.refusals import Refused

LARGE = 64 * 1024  # bytes that take long enough to parse for other requests to notice
MAX_DEPTH = 64  # the tools of a chat are JSON schemas, which nest
JSON_TYPES = ("application/json", "text/json")


async def read_object(request: HttpRequest, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """The JSON object that a request carries, or Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Besides being what clients send: a web page of another origin cannot send it without asking first.
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise Refused(415, f"Content-Type is '{kind}': expected 'application/json'.")
    try:
        async with asyncio.timeout(seconds or None):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise Refused(408, f"the request's body did not come within {seconds:g} seconds.") from None
    told = parse(raw) if len(raw) < LARGE else await asyncio.to_thread(parse, raw)
    if not isinstance(told, dict):
        raise Refused(400, f"the request's body is a JSON {type(told).__name__}: expected an object.")
    return told


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    too_large = Refused(413, f"the request's body has more than the {max_bytes:,} bytes that are admitted.")
    if told.isdecimal() and int(told) > max_bytes:  # before a byte of it is read
        raise too_large
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > max_bytes:
            raise too_large
    return bytes(raw)


def parse(raw: bytes) -> Any:
    """JSON, or Refused with 400."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(400, f"the request's body is not UTF-8 at byte {error.start}.") from None
    _check_depth(text)
    try:
        told = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise Refused(400, f"the request's body is not JSON: {error}.") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise Refused(400, f"the request's body has a number that cannot be read: {error}.") from None
    _check_text(text, told)
    return told


def _check_depth(text: str) -> None:
    """Before parsing: the parser calls itself once a level."""
    depth = 0
    # A string that never ends is taken whole too: tried anew from each quote in it, the time would grow as its square.
    for found in re.finditer(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', text, re.DOTALL):
        mark = found[0]
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Refused(400, f"the request's body is nested deeper than {MAX_DEPTH} levels.")
        elif mark in "]}":
            depth -= 1


def _refuse_constant(name: str) -> NoReturn:
    raise Refused(400, f"the request's body has {name}, which is not JSON: expected finite numbers.")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refused(400, f"the number {text[:40]} is too large.")
    return number


def _check_text(text: str, told: Any) -> None:
    """Halves of surrogate pairs are JSON and no text: no tokenizer reads them."""
    if not re.search(r"\\u[dD][89a-fA-F]", text):
        return
    try:
        json.dumps(told, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(400, "the request's body has half of a surrogate pair, which is not text.") from None
