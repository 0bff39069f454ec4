"""Refusals as clients of OpenAI expect them: a status, and a body that says what was wrong."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

# What goes with a status: OpenAI's `type`, and a `code` where there is nothing closer.
KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "timeout"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "overloaded"),
    503: ("server_error", "unavailable"),
}
RETRY_AFTER = {429: "1", 503: "5"}  # seconds


class Refused(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, Any]]:
    """OpenAI's error object."""
    kind, known = KINDS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return {"error": {"message": message, "type": kind, "param": param, "code": code or known}}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The error as a response, with Retry-After where trying again helps."""
    told = dict(headers or {})
    if status in RETRY_AFTER:
        told["Retry-After"] = RETRY_AFTER[status]
    if status == 401:
        told["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(status, message, param=param, code=code), status, told)
