"""The OpenAPI document: what FastAPI sees of the routes, the bodies that the routes read themselves, and the key."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.problems import Problem
from service.routes.requests import BODIES

REF = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Make `app.openapi()` complete; it is built once, at the first call."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, bodies = models_json_schema([(model, "validation") for model in (*BODIES, Problem)], ref_template=REF)
    components = made.setdefault("components", {})
    components.setdefault("schemas", {}).update(bodies.get("$defs", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "not needed where no keys are configured"}}
    made["security"] = [{"key": []}, {}]
    made["paths"]["/healthz"]["get"]["security"] = []
    return made
