"""Every error as RFC 9457 `application/problem+json`: what was wrong, in which field, and the cure.

`invalid` turns pydantic's findings into paths a client knows (`tasks.3.limits.turns`), without the names of our types in them.
"""

import http
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from service.errors import FieldProblem, InvalidError, RequestError

MEDIA_TYPE = "application/problem+json"
MAX_FIELDS = 50
"""Problems named in one answer; a body with more is as wrong, and the answer stays small."""


class ProblemField(BaseModel):
    """One wrong field and the cure."""

    field: str = Field(examples=["tasks.3.limits.turns"])
    problem: str


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    fields: list[ProblemField] | None = None


def problem(
    status: int, title: str, detail: str, *, fields: Sequence[FieldProblem] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that carries a problem."""
    body: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if fields:
        body["fields"] = [{"field": _printable(f.field), "problem": _printable(f.problem)} for f in fields[:MAX_FIELDS]]
    body["detail"] = _printable(detail)
    return Response(orjson.dumps(body), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def answer_error(error: RequestError) -> Response:
    """A `RequestError` as its problem; `Retry-After` in whole seconds where the error knows when to come back."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == http.HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return problem(error.status, error.title, error.detail, fields=error.fields, headers=headers)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: these problems, and those that any route can answer."""
    every = {*statuses, 401, 422, 503}
    return {
        status: {"description": http.HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": PROBLEM_SCHEMA}}}
        for status in sorted(every)
    }


PROBLEM_SCHEMA = {"$ref": "#/components/schemas/Problem"}


def install(app: FastAPI) -> None:
    """Answer every error of `app` as a problem, also those of the framework and our own bugs."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return answer_error(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = {404: "there is nothing at this path; see /openapi.json", 405: "this path does not take that method"}
        title = http.HTTPStatus(error.status_code).phrase
        headers = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
        return problem(error.status_code, title, detail.get(error.status_code, str(error.detail)), headers=headers)

    async def on_parameter_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer_error(InvalidError("a parameter is wrong", fields=_parameters(error.errors())))

    async def on_bug(_: Request, __: Exception) -> Response:
        return problem(500, "Internal error", "a bug of ours; it is in the gateway's log. Nothing was half-done: try again")

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_parameter_error)
    app.add_exception_handler(Exception, on_bug)


def _methods(request: Request) -> list[str]:
    """Every method that the path takes; the framework names only those of the first route it met."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    found = [methods for template, methods in paths.items() if compile_path(template)[0].match(request.url.path)]
    return sorted({method.upper() for methods in found for method in methods})


def _parameters(errors: Iterable[Any]) -> list[FieldProblem]:
    return [FieldProblem(field=".".join(str(part) for part in e["loc"]), problem=str(e["msg"])) for e in errors]


def invalid(error: ValidationError, value: object, *, prefix: str = "") -> InvalidError:
    """Pydantic's findings about `value`, which came from the client, as fields of the client's body under `prefix`."""
    return InvalidError("some fields are wrong", fields=field_problems(error, value, prefix=prefix))


def field_problems(error: ValidationError, value: object, *, prefix: str = "") -> list[FieldProblem]:
    """One problem a field; of a union's arms only the one that the client seems to have meant."""
    found = [_located(details, value) for details in error.errors(include_url=False, include_input=False)]
    meant = _meant_arms(found)
    problems: dict[str, FieldProblem] = {}
    for located in found:
        if all(meant[place] == tag for place, tag in located.arms.items()):
            field = f"{prefix}{located.path}".strip(".") or "body"
            problems.setdefault(field, FieldProblem(field=field, problem=_sentence(located.details)))
    return list(problems.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """One complaint in the client's terms. `arms`: for each union on the way, its path and the arm that complains."""

    details: ErrorDetails
    path: str
    arms: dict[str, str]

    @property
    def distance(self) -> int:
        """How far what was sent is from what this arm wants."""
        match self.details["type"]:
            case "missing" | "extra_forbidden":
                return 1
            case "literal_error":
                return 50
        return 100 if self.details["type"].endswith("_type") else 0


def _located(details: ErrorDetails, value: object) -> _Located:
    parts: list[str] = []
    arms: dict[str, str] = {}
    location = details["loc"]
    for position, part in enumerate(location):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif not (position == len(location) - 1 and details["type"] == "missing"):
            arms[".".join(parts)] = str(part)  # pydantic's name of a type of ours, which says nothing to a client
            continue
        parts.append(str(part))
    return _Located(details=details, path=".".join([*parts, *_named_field(details)]), arms=arms)


def _meant_arms(found: Sequence[_Located]) -> dict[str, str]:
    """For each union the arm whose complaints are the smallest."""
    distances: dict[str, dict[str, int]] = {}
    for located in found:
        for place, tag in located.arms.items():
            arms = distances.setdefault(place, {})
            arms[tag] = arms.get(tag, 0) + located.distance
    return {place: min(arms, key=lambda tag: arms[tag]) for place, arms in distances.items()}


def _named_field(details: ErrorDetails) -> list[str]:
    """A rule over several fields names the one to change at the start of its message."""
    match = re.match(r"Value error, ([a-z_]+(?:\.[a-z_]+)*):? ", details["msg"])
    return match.group(1).split(".") if match and match.group(1) != "must" else []


def _sentence(details: ErrorDetails) -> str:
    match details["type"]:
        case "missing":
            return "is required; add it"
        case "extra_forbidden":
            return "is not a known field; remove it or check its spelling"
        case "recursion_loop":
            return "is nested too deeply"
    message = re.sub(r"^Value error, ([a-z_]+: )?", "", details["msg"]).replace("Input should", "should", 1)
    return message[0].lower() + message[1:]
