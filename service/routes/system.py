"""Whether the process is up and useful, and its numbers."""

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from service.errors import UnavailableError
from service.gateway import GatewayDep
from service.metrics import CONTENT_TYPE
from service.problems import problem_responses
from service.routes.answers import answer

router = APIRouter(tags=["system"])


class HealthAnswer(BaseModel):
    status: str


class ReadyAnswer(BaseModel):
    status: str
    workers: int


@router.get("/healthz", responses={200: {"model": HealthAnswer}}, summary="The process is up")
async def healthz() -> Response:
    return answer(HealthAnswer(status="ok"))


@router.get("/readyz", responses={200: {"model": ReadyAnswer}, **problem_responses()}, summary="Redis and a worker are there")
async def readyz(gateway: GatewayDep) -> Response:
    await gateway.store.ping()
    workers = await gateway.store.workers()
    if not workers:
        raise UnavailableError("no worker is alive; start one with 'rollway worker' or 'rollway serve --workers 1'", retry_after_s=5)
    return answer(ReadyAnswer(status="ready", workers=len(workers)))


METRICS_TEXT = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: METRICS_TEXT, **problem_responses()},
    summary="Prometheus (operator's key)",
)
async def metrics(gateway: GatewayDep) -> Response:
    return Response(await gateway.metrics.render(gateway.jobs, gateway.rates), media_type=CONTENT_TYPE)
