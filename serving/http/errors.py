"""Every failure as `{"error": {message, type, param, code}}`, with no path or address in it."""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_jax.adapters.registry import AdapterNotFound, RegistryBusy
from serving.api.request import EngineDead, QueueFull

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
_PATH = re.compile(r"(?<![\w:/.`~-])~?/(?:[^\s/'\"`,:;()\[\]]+/)*[^\s/'\"`,:;()\[\]]+")
_FILE_URL = re.compile(r"file:/{1,3}[^\s'\"`,;]+")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
# Fields that the engine checks, as it knows the vocabulary.
_FIELD = re.compile(r"(logit_bias|stop_token_ids|allowed_token_ids|bad_words|logprobs)\b")
# A field of a body in pydantic's path, which also has kinds: str, list[str], ImageUrl.
_NAME = re.compile(r"(?!(?:str|int|float|bool|dict|list)\Z)[a-z_]{1,32}")
_OF_CALLERS = ("logit_bias", "metadata", "chat_template_kwargs")  # fields with keys of callers
_MAX_MESSAGE = 2000  # characters; a longer one would only echo the request


class ApiError(Exception):
    """An answer that is not a success; `message` is sent as it is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message[:_MAX_MESSAGE], param
        self.type = type or TYPES.get(status, "Error")
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": error | {"code": self.status}}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def scrub(message: str) -> str:
    """Return the message with directories and memory addresses left out, cut to what is sent."""
    message = message[: 2 * _MAX_MESSAGE]
    message = _FILE_URL.sub(_last_part, message)
    return _ADDRESS.sub("<address>", _PATH.sub(_last_part, message))


def _last_part(path: re.Match[str]) -> str:
    """Return a file's own name: it says what is wrong with which file, but not where it is."""
    parts = path[0].rstrip("/").split("/")
    return parts[-1] if len(parts) > 2 and parts[-1] else "<path>"


def unknown_model(name: str, param: str = "model") -> ApiError:
    """The one answer to a model name that does not exist or that the caller may not see."""
    why = f"The model `{name[:256]}` does not exist. GET /v1/models lists the models."
    return ApiError(404, why, param=param)


def from_exception(error: Exception) -> ApiError:
    """Return the answer an exception of the engine or of a check stands for."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        seconds = str(max(1, round(error.retry_after_s)))
        return ApiError(429, scrub(str(error)), headers={"Retry-After": seconds})
    if isinstance(error, RegistryBusy):
        seconds = str(max(1, math.ceil(error.retry_after_s)))
        status = 429 if error.of_key else 503
        return ApiError(status, scrub(str(error)), headers={"Retry-After": seconds})
    if isinstance(error, EngineDead):
        return ApiError(503, "The engine has stopped.")
    if isinstance(error, AdapterNotFound):
        return unknown_model(error.name)
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, NotImplementedError):
        return ApiError(501, scrub(str(error)))
    if isinstance(error, ValueError):
        field = _FIELD.match(str(error))
        return ApiError(400, scrub(str(error)), param=field and field[0])
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return ApiError(500, "Internal server error.")


@contextlib.contextmanager
def after_checks(*others: type[Exception]) -> Iterator[None]:
    """Log what is raised here and make it an ApiError 500, except ApiErrors and `others`.

    The request has been checked by then: not even a ValueError means that it is at fault. An engine
    that has stopped is a 503, as before the checks.
    """
    try:
        yield
    except (ApiError, *others):
        raise
    except EngineDead as error:
        raise from_exception(error) from error
    except Exception as error:
        logger.exception("Unexpected error while making an answer.")
        raise from_exception(RuntimeError(str(error))) from error


def from_validation(error: ValidationError | RequestValidationError) -> ApiError:
    """Name each wrong field and what it should be; values are never repeated."""
    fields: dict[str, list[str]] = {}
    for item in _details(error):
        texts = fields.setdefault(_place(item["loc"]) or "body", [])
        if item["msg"] not in texts and len(texts) < 3:
            texts.append(item["msg"])
    shown = [f"{field}: {' / '.join(texts)}" for field, texts in list(fields.items())[:5]]
    first = next(iter(fields), "body")
    return ApiError(400, "; ".join(shown), param=None if first == "body" else first.split(".")[0])


def _place(location: Sequence[int | str]) -> str:
    """Return a field's path: `messages.0.role`. Kinds of a union and keys of callers stay out."""
    if location and location[0] in _OF_CALLERS:
        return str(location[0])
    first, index, rest = location[:1], location[1:2], location[1:]
    where = [*first, *(part for part in index if isinstance(part, int))]
    where += [part for part in rest if isinstance(part, str) and _NAME.fullmatch(part)]
    return ".".join(map(str, where))


def json_error(error: ValidationError) -> ApiError | None:
    """Return the answer to a body that is not JSON, with the place; None for one that is."""
    for item in _details(error):
        if item["type"] == "json_invalid":
            return ApiError(400, f"The body is not valid JSON: {_json_problem(item['msg'])}.")
    return None


def _json_problem(message: str) -> str:
    """Return what pydantic says of broken JSON, which repeats nothing of it."""
    problem = message.removeprefix("Invalid JSON: ")
    if "hex escape" in problem:
        problem += ". A character beyond \\uffff has two escapes; one alone is no text"
    return problem


def _details(error: ValidationError | RequestValidationError) -> Sequence[Any]:
    """Return what is wrong, without copies of the values.

    Lists end at their first wrong entry (`protocol.Quick`), so that there are few errors.
    """
    if isinstance(error, RequestValidationError):
        return error.errors()
    return error.errors(include_url=False, include_context=False, include_input=False)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return from_exception(error).response()


async def _wrong_method(request: Request, error: Exception) -> JSONResponse:
    """Answer 405 with all methods of the path; the framework names those of its first route."""
    if not isinstance(error, HTTPException):
        raise error
    path = getattr(request.scope.get("route"), "path", None)
    methods = sorted(map(str.upper, request.app.openapi()["paths"].get(path, ())))
    allowed = ", ".join(methods) or (error.headers or {}).get("Allow", "")
    shown = f"Method Not Allowed: this path takes {allowed}."
    return ApiError(405, shown, headers={"Allow": allowed}).response()


def install(app: FastAPI) -> None:
    """Make the app answer every expected exception with our body."""
    for kind in (ApiError, HTTPException, RequestValidationError, ValidationError, QueueFull):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(405, _wrong_method)
    for kind in (AdapterNotFound, EngineDead, NotImplementedError, ValueError):
        app.add_exception_handler(kind, _handle)


class CatchAll:
    """Answer 500 without details to whatever nobody expected, and log it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientDisconnect:
            logger.info("A client left before its request was here.")
            if not started:  # counted as the client's; nobody reads it
                await ApiError(408, "The client has gone.").response()(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            logger.exception("Unexpected error while answering a request.")
            await from_exception(RuntimeError(str(error))).response()(scope, receive, send)
