"""Weight updates, driven: the calls to generators in their order, each step stored before the next, by one gateway a job.

The rules are `weight_rules`' and the record is `weight_store`'s; here is only who calls whom when. Everything is repeated safely, so
whichever gateway takes a job over (its driver died, or fell silent for `DRIVER_S`) goes on from the record: a pause, a label and a continue
change nothing the second time, and weights that are there under their label are not loaded again.

What always holds: one driver a job; a generator goes on only after its label was read and is the one that it must have.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import aiohttp

from service.errors import ConflictError, GeneratorError, NotFoundError, UnavailableError
from service.generator_control import FIRST_PAUSE_S, GeneratorControl, LoadError, tried
from service.generators import CONTROL_S, control_urls
from service.keys import job_of
from service.records import GeneratorSpec
from service.weight_records import JobWeights, Said, Standing, UpdateState, Wanted, WeightUpdate
from service.weight_rules import (
    BUSY_S,
    abandon,
    all_asked,
    begin,
    close,
    expire,
    finish,
    may_serve,
    missed,
    paused,
    readmitted,
    serving,
    untouched,
    without,
)
from service.weight_store import Change, Known, WeightStore, canonical

logger = logging.getLogger(__name__)

DRIVER_S = 6.0
"""How long a driver may be silent; renewed at a third of it."""

LOOK_S = 1.0
"""How often each gateway looks for jobs without a driver."""

WATCH_S = 0.1
"""How often a driver looks whether the trainer has finished; other gateways take that call too."""

RECHECK_S = 1.0
"""How often generators out of service are asked for their labels."""

PROBE_S = 2.0
PAUSE_S = 30.0
"""One call that pauses: in mode abort the engine waits for what runs to come to its next token."""

AT_ONCE = 64
"""Generators of one job that are spoken to side by side."""


class WeightUpdates:
    """The updates of all jobs, as one gateway sees them. Methods raise UnavailableError when the store is away."""

    def __init__(self, weights: WeightStore, http: aiohttp.ClientSession, *, driver_s: float = DRIVER_S) -> None:
        self._weights = weights
        self._http = http
        self._driver_s = driver_s
        self._me = uuid.uuid4().hex
        self._wake = asyncio.Event()
        self._driven: dict[str, asyncio.Task[None]] = {}
        self._stood: set[tuple[str, str]] = set()
        """(update, url) that this process paused, and has driven since: nobody can have let it go on."""

    # ------------------------------------------------------------------------------------------------------------------ for clients

    def check(self, known: Known, wanted: Wanted) -> None:
        """Raises ConflictError where `begin` would, as far as the job itself goes."""
        begin(known.weights, wanted, job_id=known.job_id, policy=(known.lineage, known.version), labels={}, now=time.time())

    async def begin(self, known: Known, wanted: Wanted, labels: dict[str, str | None]) -> WeightUpdate:
        """Begin an update of the generators of `known`, which had these labels a moment ago.

        Raises:
            NotFoundError: the job is gone.
            ConflictError: another update runs, the version goes backwards, or another job moves weights on one of the generators.
        """

        def begun(now: Known) -> JobWeights:
            if now.raw_spec != known.raw_spec:
                raise ConflictError("the job was changed meanwhile; try again", retry_after_s=BUSY_S)
            policy = (now.lineage, now.version)
            return begin(now.weights, wanted, job_id=known.job_id, policy=policy, labels=labels, now=time.time())

        await self._weights.claim(known.job_id, known.spec.generator_specs)
        weights = await self._weights.change(known.job_id, begun, same_spec=True)
        assert weights.update is not None
        self._wake.set()
        return weights.update

    async def finish(self, update_id: str) -> WeightUpdate:
        """Raises NotFoundError and ConflictError as `weight_rules.finish`."""
        return await self._said(update_id, lambda known: finish(known.weights, update_id, now=time.time()))

    async def abandon(self, update_id: str, said: Said) -> WeightUpdate:
        """Raises NotFoundError and ConflictError as `weight_rules.abandon`."""
        return await self._said(update_id, lambda known: abandon(known.weights, update_id, said, now=time.time()))

    async def _said(self, update_id: str, change: Change) -> WeightUpdate:
        await self._weights.update(update_id)
        weights = await self._weights.change(job_of(update_id), change)
        self._wake.set()
        assert weights.update is not None
        return weights.update

    async def check_patch(self, job_id: str) -> None:
        """Raises ConflictError while an update moves the generators that are to be changed."""
        running = (await self._weights.read(job_id)).running
        if running is not None:
            told = f"update {running.update_id} is {running.state}: generators cannot change under it"
            raise ConflictError(f"{told}; finish or abandon it, or wait for it", retry_after_s=BUSY_S)

    async def patched(self, job_id: str, before: Iterable[GeneratorSpec]) -> None:
        """The job's generators changed: those that left are anybody's, and go on."""
        known = await self._weights.known(job_id)
        kept = {url for spec in known.spec.generator_specs for url in control_urls(spec)}
        out = {url for url, generator in known.weights.generators.items() if generator.standing is not Standing.SERVING}
        left = [(spec, [url for url in control_urls(spec) if url not in kept]) for spec in before if spec.url in out]
        still = [spec.model_copy(update={"control_urls": urls}) for spec, urls in left if urls]
        await asyncio.gather(*(self._go_on(job_id, spec) for spec in still))
        urls = set(known.weights.generators) - {spec.url for spec in known.spec.generator_specs}
        await self._change(job_id, lambda now: without(now.weights, urls))
        await self._weights.keep(job_id, kept)

    async def deleted(self, job_id: str) -> None:
        """The job is gone: its generators go on, for whoever uses them next."""
        await self._weights.attend(job_id)
        self._wake.set()

    # ------------------------------------------------------------------------------------------------------------------ who drives

    @asynccontextmanager
    async def driving(self) -> AsyncIterator[None]:
        """Drive what no other gateway drives, while the body runs."""
        task = asyncio.create_task(self._look_forever(), name="weight updates")
        try:
            yield
        finally:
            task.cancel()
            for driven in self._driven.values():
                driven.cancel()
            await asyncio.gather(task, *self._driven.values(), return_exceptions=True)

    async def _look_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except UnavailableError as error:
                logger.warning("weight updates wait: %s", error)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        for job_id in await self._weights.unsettled():
            if job_id not in self._driven and await self._weights.drive(job_id, self._me, ttl_s=self._driver_s):
                task = asyncio.create_task(self._drive(job_id), name=f"weights of {job_id}")
                self._driven[job_id] = task
                task.add_done_callback(partial(self._left, job_id))

    def _left(self, job_id: str, _: asyncio.Task[None]) -> None:
        self._driven.pop(job_id, None)
        self._stood = {(update_id, url) for update_id, url in self._stood if job_of(update_id) != job_id}

    async def _drive(self, job_id: str) -> None:
        """Take the job's update as far as it goes. Whoever lost the right to it stops at once; the next one repeats what it had begun."""
        try:
            async with self._right(job_id):
                while await self._step(job_id):
                    pass
        except TimeoutError:
            logger.warning("weights of %s: another gateway drives now", job_id)
        except UnavailableError as error:
            logger.warning("weights of %s wait: %s", job_id, error)
        except Exception:  # the one place where a failing driver is no more than a failing driver
            logger.exception("weights of %s", job_id)
            await asyncio.sleep(LOOK_S)

    @asynccontextmanager
    async def _right(self, job_id: str) -> AsyncIterator[None]:
        """Run the body only while the right to drive is ours: its deadline is that right's, moved by each renewal. Raises TimeoutError."""
        loop = asyncio.get_running_loop()

        async def renew(deadline: asyncio.Timeout) -> None:
            while True:
                await asyncio.sleep(self._driver_s / 3)
                asked_at = loop.time()
                try:
                    ours = await self._weights.drive(job_id, self._me, ttl_s=self._driver_s)
                except UnavailableError:
                    continue
                deadline.reschedule(asked_at + self._driver_s if ours else asked_at)

        async with asyncio.timeout(self._driver_s) as deadline:
            renewal = asyncio.create_task(renew(deadline))
            try:
                yield
            finally:
                renewal.cancel()
                await asyncio.gather(renewal, return_exceptions=True)
                try:
                    await self._weights.drive(job_id, self._me, ttl_s=0)
                except UnavailableError:
                    logger.info("the right to drive %s is left to run out", job_id)

    # ------------------------------------------------------------------------------------------------------------------ the steps

    async def _step(self, job_id: str) -> bool:
        """Whether there may be another."""
        try:
            known = await self._weights.known(job_id)
        except NotFoundError:
            await self._free(job_id)
            return False
        if not known.weights.unsettled:
            await self._weights.settled(job_id)
            return False
        update = known.weights.running
        if update is None:
            await self._readmit(known)
            return True
        match update.state:
            case UpdateState.PAUSING:
                waiting = [url for url, part in update.parts.items() if part.state is UpdateState.PAUSING]
                await self._each(waiting, lambda url: self._pause(known, update, url))
                await self._change(job_id, lambda now: all_asked(now.weights, update.update_id, now=time.time()))
            case UpdateState.PAUSED:
                await self._watch(WATCH_S)
                if time.time() >= update.deadline:
                    await self._change(job_id, lambda now: expire(now.weights, now=time.time()))
            case UpdateState.LOADING:
                open_parts = [url for url, part in update.parts.items() if not part.state.over]
                await self._each(open_parts, lambda url: self._bring(known, update, url))
                await self._change(job_id, lambda now: close(now.weights, update.update_id, now=time.time()))
        return True

    async def _pause(self, known: Known, update: WeightUpdate, url: str) -> None:
        try:
            async with asyncio.timeout(max(CONTROL_S, update.deadline - time.time())):
                control = self._control(known, url)
                if update.mode == "drain":
                    await control.idle()
                await tried(lambda: control.pause(update.pause_mode, timeout_s=PAUSE_S))
        except (GeneratorError, TimeoutError) as error:
            await self._missed(known, update, url, error)
        else:
            self._stood.add((update.update_id, url))
            await self._change(known.job_id, lambda now: paused(now.weights, update.update_id, url, now=time.time()))

    async def _bring(self, known: Known, update: WeightUpdate, url: str) -> None:
        """Weights, label, and on; a generator that cannot be brought along is told of, never passed over."""
        try:
            async with asyncio.timeout(max(CONTROL_S, update.deadline - time.time())):
                control = self._control(known, url)
                await self._move(control, known, update, url)
                if (found := await tried(control.label)) != update.label:
                    raise GeneratorError(f"its weight_version is {found!r} after it was set to {update.label!r}", retryable=False)
                await tried(control.resume)
        except LoadError as error:
            if error.moved:
                await self._missed(known, update, url, error)
            else:
                why = str(error)[:500]
                await self._change(known.job_id, lambda now: untouched(now.weights, update.update_id, url, why))
        except (GeneratorError, TimeoutError) as error:
            await self._missed(known, update, url, error)
        else:
            await self._change(known.job_id, lambda now: serving(now.weights, update.update_id, url, now=time.time()))

    async def _move(self, control: GeneratorControl, known: Known, update: WeightUpdate, url: str) -> None:
        if update.from_disk is None:
            await tried(lambda: control.relabel(update.label))
            if update.flush_cache:
                await tried(control.flush)
            return
        if (update.update_id, url) not in self._stood:  # another gateway paused it, and may have let it go on
            before = known.weights.generators[url]
            if not before.unprovable and before.label != update.label == await tried(control.label):
                return
            await tried(lambda: control.pause("retract" if update.flush_cache else "in_place", timeout_s=PAUSE_S))
        left_s = max(CONTROL_S, update.deadline - time.time())
        await control.load(update.from_disk, update.label, flush_cache=update.flush_cache, timeout_s=left_s)

    async def _missed(self, known: Known, update: WeightUpdate, url: str, error: Exception) -> None:
        why = str(error) or f"not within {update.timeout_s:g} s"
        logger.warning("generator %s missed update %s: %s", url, update.update_id, why)
        await self._change(known.job_id, lambda now: missed(now.weights, update.update_id, url, why[:500]))

    async def _readmit(self, known: Known) -> None:
        """Let those go on that are out of service and have the right label."""
        out = [url for url, generator in known.weights.generators.items() if generator.standing is not Standing.SERVING]
        await self._drop(known, set(out) - {spec.url for spec in known.spec.generator_specs})

        async def ask(url: str) -> None:
            try:
                control = self._control(known, url)
                found = await control.label(timeout_s=PROBE_S)
                if may_serve(known.weights, url, found):
                    await control.resume(timeout_s=PROBE_S)
                    await self._change(known.job_id, lambda now: readmitted(now.weights, url, found, now=time.time()))
            except GeneratorError as error:
                logger.info("generator %s stays out of service: %s", url, error)

        await self._each(out, ask)
        if (await self._weights.read(known.job_id)).unsettled:
            await self._watch(RECHECK_S)

    async def _watch(self, seconds: float) -> None:
        """Wait, unless a client of this gateway said something."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _free(self, job_id: str) -> None:
        """Of a deleted job: what it made stand still goes on, unless another job moves weights there by now."""
        ours = await self._weights.claimed(job_id)
        if (known := await self._weights.tombstone(job_id)) is not None:
            out = {url for url, generator in known.weights.generators.items() if generator.standing is not Standing.SERVING}
            still = [spec for spec in known.spec.generator_specs if spec.url in out]
            await asyncio.gather(*(self._go_on(job_id, spec) for spec in still if ours.issuperset(map(canonical, control_urls(spec)))))
        await self._weights.keep(job_id, ())
        await self._weights.settled(job_id)

    async def _drop(self, known: Known, urls: set[str]) -> None:
        """Generators that the job no longer has."""
        for url in urls:
            if known.weights.generators[url].standing is not Standing.SERVING:
                await self._go_on(known.job_id, GeneratorSpec(url=url))
        if urls:
            await self._change(known.job_id, lambda now: without(now.weights, urls))

    async def _go_on(self, job_id: str, spec: GeneratorSpec) -> None:
        try:
            await tried(lambda: GeneratorControl(self._http, spec).resume(timeout_s=PROBE_S))
        except GeneratorError as error:
            logger.warning("generator %s, no longer of job %s, was left standing still: %s", spec.url, job_id, error)

    def _control(self, known: Known, url: str) -> GeneratorControl:
        """Raises GeneratorError where the job no longer has it."""
        spec = next((spec for spec in known.spec.generator_specs if spec.url == url), None)
        if spec is None:
            raise GeneratorError("the job no longer has this generator", retryable=False)
        return GeneratorControl(self._http, spec)

    async def _change(self, job_id: str, change: Change) -> None:
        """Waits for a store that is away, as long as the right to drive lasts. A deleted job is noticed by the next step."""
        while True:
            try:
                await self._weights.change(job_id, change)
                return
            except NotFoundError:
                logger.info("job %s was deleted while its weights moved", job_id)
                return
            except UnavailableError as error:
                logger.warning("weights of %s wait: %s", job_id, error)
                await asyncio.sleep(FIRST_PAUSE_S)

    async def _each(self, urls: Iterable[str], call: Callable[[str], Awaitable[None]]) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(url: str) -> None:
            async with places:
                await call(url)

        async with asyncio.TaskGroup() as group:
            for url in urls:
                group.create_task(one(url))
