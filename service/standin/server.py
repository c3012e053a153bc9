"""The stand-in's HTTP server: `/generate`, the record of what was sampled, and the process around it."""

import asyncio
import contextlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from service.ports import listening
from service.standin.control import NOTICE, Control, error_bodies
from service.standin.engine import DuplicateRidError, Engine, Running
from service.standin.policy import Policy
from service.standin.sampler import NothingToSayError, Plan, Sampler
from service.standin.template import Template
from service.standin.wire import answer, checked_request, meta_info, output_limit, prompt_of, refused

logger = logging.getLogger(__name__)

FIRST_LABEL = "0"
"""The version that a job begins with; SGLang's own default label is "default"."""

MAX_BODY_BYTES = 512 * 2**20
KEEP_ALIVE_S = 5.0
"""SGLang's."""


class Generate:
    """`POST /generate`."""

    def __init__(self, engine: Engine, sampler: Sampler, control: Control, *, context_tokens: int) -> None:
        self._engine = engine
        self._sampler = sampler
        self._control = control
        self._context_tokens = context_tokens
        self.record: BinaryIO | None = None

    async def answer(self, http: web.Request) -> web.Response:
        started = time.monotonic()
        request = checked_request(await http.read(), http.content_type)
        ids = prompt_of(request)
        limit = output_limit(len(ids), request.sampling_params.get("max_new_tokens"), self._context_tokens)
        prompt = self._known(ids)
        if prompt is None:
            return self._die(http)
        rid = request.rid or uuid.uuid4().hex
        try:
            plan = self._sampler.plan(prompt, request.sampling_params, max_tokens=limit)
            running = await self._sampled(rid, ids, plan)
        except NothingToSayError as error:
            raise refused(str(error)) from error
        except DuplicateRidError as error:
            raise refused(f"Duplicate request ID detected: {rid}") from error
        output_ids = plan.ids[: running.tokens]
        self._write(ids, running, plan)
        meta = meta_info(running, plan, prompt_tokens=len(ids), logprobs=request.return_logprob, started=started)
        return answer({"text": self._sampler.decode(output_ids), "output_ids": output_ids, "meta_info": meta})

    async def _sampled(self, rid: str, ids: list[int], plan: Plan) -> Running:
        """A client that leaves has its request aborted, as with SGLang; what was sampled for it by then is on the record all the same.

        Raises:
            DuplicateRidError: the id is in flight.
        """
        sampling = asyncio.ensure_future(self._engine.run(rid, len(plan.ids)))
        try:
            return await asyncio.shield(sampling)
        except asyncio.CancelledError:
            if rid in self._engine.running:
                self._engine.abort(rid)
                self._write(ids, await sampling, plan)
            else:
                sampling.cancel()
                await asyncio.wait((sampling,))
            logger.info("the client of %s left", rid)
            raise

    def _known(self, ids: list[int]) -> "array[int] | None":
        """The prompt as int32; None if an id is outside the vocabulary."""
        try:
            prompt = array("i", ids)
        except OverflowError:
            return None
        return prompt if np.frombuffer(prompt, dtype=np.uint32).max() < self._sampler.vocab_size else None

    def _die(self, http: web.Request) -> web.Response:
        """An id outside the vocabulary ends a real engine: no answer. This one lives on and counts it."""
        self._control.deaths += 1
        logger.error("an input id is outside the vocabulary of %d: a real SGLang would be dead now", self._sampler.vocab_size)
        if http.transport is not None:
            http.transport.abort()
        return web.Response(status=500)

    def _write(self, ids: list[int], running: Running, plan: Plan) -> None:
        """One JSON line a generation, there before its answer leaves."""
        if self.record is None:
            return
        count = running.tokens
        versions = [_version(span.version) for span in running.spans for _ in range(span.end - span.start)]
        line = {
            "rid": running.rid,
            "input_ids": ids,
            "output_ids": plan.ids[:count],
            "logprobs": plan.logprobs[:count],
            "versions": versions,
            "finish": "abort" if count < running.total else "length" if plan.stopped_by is None else "stop",
        }
        self.record.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))  # into the page cache: the disk is not waited for
        self.record.flush()


def _version(label: str) -> int | str:
    return int(label) if label.isdecimal() else label


def create_standin(
    *,
    tokenizer: Tokenizer,
    template: Template,
    policy: Policy,
    seed: int = 0,
    record: Path | None = None,
    tokens_per_s: float | None = None,
    max_running: int | None = None,
    context_tokens: int = 32_768,
    label: str = FIRST_LABEL,
    model_path: str = "stand-in",
) -> web.Application:
    """The stand-in as an aiohttp application. `tokens_per_s`: of each request; None: at once. `max_running`: requests at once, the others
    wait in line; None: no limit. `label`: its first weight_version."""
    engine = Engine(label=label, tokens_per_s=tokens_per_s, max_running=max_running)
    sampler = Sampler(tokenizer, template, policy, seed=seed)
    control = Control(engine, model_path=model_path, vocab_size=sampler.vocab_size, context_tokens=context_tokens)
    app = web.Application(middlewares=[error_bodies], client_max_size=MAX_BODY_BYTES)
    app.add_routes(control.routes())
    generate = Generate(engine, sampler, control, context_tokens=context_tokens)
    app.add_routes([web.post("/generate", generate.answer), web.put("/generate", generate.answer)])

    async def recording(app: web.Application) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            generate.record = stack.enter_context(record.open("ab")) if record else None
            yield

    async def leave(app: web.Application) -> None:
        engine.resume()
        engine.abort_all()

    app.cleanup_ctx.append(recording)
    app.on_shutdown.append(leave)
    return app


def serve_standin(
    *,
    tokenizer: Path,
    renderer: str,
    policy: Policy,
    host: str,
    port: int,
    seed: int = 0,
    record: Path | None = None,
    tokens_per_s: float | None = None,
    max_running: int | None = None,
    context_tokens: int = 32_768,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        InvalidError: the tokenizer or the renderer cannot be loaded.
        PortRefusedError: the port is in use.
    """
    import uvloop

    sockets = listening(host, port)
    app = create_standin(
        **load_model(tokenizer, renderer),
        policy=policy,
        seed=seed,
        record=record,
        tokens_per_s=tokens_per_s or None,
        max_running=max_running,
        context_tokens=context_tokens,
        model_path=str(tokenizer),
    )
    logger.warning("%s; on %s:%d", NOTICE, host, sockets[0].getsockname()[1])
    web.run_app(
        app,
        sock=sockets,
        print=None,
        access_log=None,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=2.0,
        handler_cancellation=True,
        loop=uvloop.new_event_loop(),
    )


def load_model(tokenizer: Path, renderer: str) -> dict[str, Any]:
    """The `tokenizer` and `template` of `create_standin`, from a tokenizer directory and a renderer's name. Seconds; blocking."""
    from service.chat import load_chat_model
    from service.settings import Settings

    folder = tokenizer.resolve()
    chat = load_chat_model(str(folder), renderer, settings=Settings(tokenizer_roots=[folder.parent]))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = raw.get_added_tokens_decoder().keys()
    template = Template.learn(lambda messages: chat.prompt(messages, []), markers=markers, stop_token_ids=chat.stop_token_ids)
    return {"tokenizer": raw, "template": template}
