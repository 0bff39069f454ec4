"""The door that every request passes: not too many at once, a key where one is asked for, and no answer but JSON when
something goes wrong.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nestling.serve.refusals import Refused, error_response

OPEN = {"/", "/health", "/favicon.ico"}  # no key is asked for
log = logging.getLogger("nestling.serve")


class Guard:
    """ASGI around the app."""

    def __init__(self, app: ASGIApp, *, key: bytes, max_requests: int, count: Callable[[int], None]) -> None:
        """count: is told the status of each request that is not admitted."""
        self.app, self.key, self.max_requests, self.count = app, key, max_requests, count
        self.num_requests = 0
        self.is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._admit(scope)
        except Refused as refused:
            self.count(refused.status)
            await error_response(refused.status, refused.message)(scope, receive, send)
            return
        self.num_requests += 1
        try:
            await self._run(scope, receive, send)
        finally:
            self.num_requests -= 1

    def _admit(self, scope: Scope) -> None:
        if scope["path"] == "/health":  # asked for most when there is most to do
            return
        if self.key and scope["path"] not in OPEN and not self._has_key(scope):
            raise Refused(401, "the API key is missing or wrong: expected 'Authorization: Bearer KEY'.")
        if self.is_closing:
            raise Refused(503, "the server is shutting down.")
        if self.num_requests >= self.max_requests:
            raise Refused(429, f"{self.num_requests} requests are open, no more are admitted. Try again later.")

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.key)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watched(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            # The one place where anything is caught: a fault of ours must not end the server. The client of a whole
            # answer was told by the app; a stream that breaks off must be cut, or it would be taken for whole.
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not is_whole:
                raise
