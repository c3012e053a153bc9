"""The stand-in's control calls: aborts, pauses, labels, health and descriptions."""

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
from aiohttp import web

from service.standin.engine import Engine, PauseMode
from service.standin.wire import RefusedError, answer, invalid, max_input

NOTICE = "stand-in generator: speaks SGLang's protocol, samples from a policy file, is no model"

HEALTH_S = 1.0
"""SGLang's health check generates a token and never takes less."""

HEALTH_TIMEOUT_S = 20.0


class Control:
    """The routes beside `/generate`."""

    def __init__(self, engine: Engine, *, model_path: str, vocab_size: int, context_tokens: int) -> None:
        self._engine = engine
        self._model_path = self._tokenizer_path = model_path
        self._told: str | None = None
        """The label that `/model_info` goes on to tell after a load that was answered as a failure."""
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._healthy = True
        self.deaths = 0
        """Prompts that would have killed a real engine."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/update_weight_version", self.relabel),
            web.post("/update_weights_from_disk", self.load),
            web.post("/flush_cache", self.flush),
            web.get("/flush_cache", self.flush),
            *(web.get(path, self.model_info, allow_head=False) for path in ("/model_info", "/get_model_info")),
            *(web.get(path, self.server_info, allow_head=False) for path in ("/server_info", "/get_server_info")),
            *(web.get(path, self.health, allow_head=False) for path in ("/health", "/health_generate")),
            web.get("/ready", self.ready, allow_head=False),
            web.get("/ping", self.ping, allow_head=False),
            web.get("/v1/loads", self.loads, allow_head=False),
        ]

    async def abort(self, request: web.Request) -> web.Response:
        body = await _object(request)
        if body.get("abort_all"):
            self._engine.abort_all()
        elif isinstance(rid := body.get("rid"), str) and rid:
            self._engine.abort(rid)
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _object(request)).get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise invalid(f"{{'loc': ('body', 'mode'), 'msg': \"Input should be 'abort', 'retract' or 'in_place'\", 'input': {mode!r}}}")
        await self._engine.pause(mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await _object(request)
        self._engine.resume()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def relabel(self, request: web.Request) -> web.Response:
        body = await _object(request)
        label = _required(body, "new_version")
        if body.get("abort_all_requests", True):
            self._engine.abort_all()
        self._engine.relabel(label)
        self._told = None
        return answer({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def load(self, request: web.Request) -> web.Response:
        """Load weights: of which a stand-in has only the label, and asks only that the path be there, where it is one of this machine.

        With requests that stand still in place, the flush fails as SGLang's does: the weights move, and the label in `/model_info` does
        not.
        """
        body = await _object(request)
        path = _required(body, "model_path")
        label = body.get("weight_version")
        if body.get("abort_all_requests", False):
            self._engine.abort_all()
        if path.startswith("/") and not await asyncio.to_thread(Path(path).exists):
            message = f"Failed to get weights iterator: there is nothing at '{path}'."
            return answer({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        async with self._engine.drained():
            told = self._told or self._engine.label
            if isinstance(label, str):
                self._engine.relabel(label)
            in_the_way = body.get("flush_cache", True) and any(not running.retractions for running in self._engine.running.values())
            self._told = told if in_the_way else None
        if in_the_way:
            detail = "because requests are still running or queued. Retract or finish them, then call /flush_cache."
            message = f"Weights were updated, but the cache was not flushed {detail}"
            return answer({"success": False, "message": message, "num_paused_requests": 0}, status=400)
        self._model_path = path
        updated = f" Weight version updated to {label}." if isinstance(label, str) else ""
        return answer({"success": True, "message": f"Succeeded to update model weights.{updated}", "num_paused_requests": 0})

    async def flush(self, request: web.Request) -> web.Response:
        if any(not running.retractions for running in self._engine.running.values()):
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def model_info(self, request: web.Request) -> web.Response:
        return answer(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_path,
                "tokenizer_path": self._tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._told or self._engine.label,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "stand-in",
                "architectures": ["StandIn"],
                "vocab_size": self._vocab_size,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        return answer(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "served_model_name": self._model_path,
                "status": "ready",
                "context_length": self._context_tokens,
                "max_req_input_len": max_input(self._context_tokens),
                "weight_version": self._engine.label,
                "internal_states": [{}],
                "version": "0.5.23",
                "frontend": "python",
                "standin": NOTICE,
                "deaths": self.deaths,
            }
        )

    async def health(self, request: web.Request) -> web.Response:
        """A probe that generates: slow, stuck while paused, and then remembered as ill by `/ready`."""
        await asyncio.sleep(HEALTH_S)
        self._healthy = await self._engine.open_within(HEALTH_TIMEOUT_S)
        return web.Response(status=200 if self._healthy else 503)

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._healthy and not self._engine.paused else 503)

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": len(self._engine.running),
            "num_waiting_reqs": len(self._engine.waiting),
            "num_used_tokens": sum(running.tokens for running in self._engine.running.values()),
            "gen_throughput": 0.0,
            "token_usage": 0.0,
        }
        return answer({"timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "version": "0.5.23", "loads": [load]})


async def _object(request: web.Request) -> dict[str, Any]:
    body = await request.read()
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise invalid("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}") from error


def _required(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise invalid(f"{{'type': 'missing', 'loc': ('body', '{name}'), 'msg': 'Field required', 'input': {{}}}}")
    return value


@web.middleware
async def error_bodies(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refusals and unknown paths in SGLang's bodies."""
    try:
        response: web.StreamResponse = await handler(request)
    except RefusedError as error:
        return answer(error.body, status=error.status)
    except web.HTTPException as error:
        return answer({"detail": error.reason}, status=error.status)
    return response
