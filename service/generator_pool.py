"""A job's generators as one: who gets a call, how many at once, what happens when one fails.

A rollout stays on its home (rendezvous hashing: the prefix cache is there) and spills to the least loaded while its home is full or unwell.
What fails is sent again with the same ids under a new request id, elsewhere where there is an elsewhere. `failures_to_open` failures in a
row take a generator out; `/ready` lets one trial call back in; its success heals it. 429 and 503 mean full, not unwell: such a call waits.

What a weight update holds gets no new calls until it goes on; what it left in quarantine loses those that it has, and they are continued
elsewhere (service/weight_rules.py).

Always true: `running` of a generator holds the calls that are with it, and loses them on every way out; a call that leaves without an
answer has told the engine to abort it. Callers that wait for a place are bounded by the callers' own slots.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from service.concurrency import Load
from service.errors import GeneratorError, MisalignedTokensError
from service.generation_reply import Asked, checked, names_version, not_older, read_label
from service.generator_load import loads_of
from service.generator_member import FAILURES_TO_OPEN, Member, PulledError, pause_s
from service.generators import BusyGeneratorError, GeneratorClient, TimedOutGeneratorError, new_rid, open_session, sampling_params
from service.records import GeneratorSpec, Sampling
from service.trajectories import Generation
from service.weight_records import GeneratorWeights, JobWeights

logger = logging.getLogger(__name__)

__all__ = ["FAILURES_TO_OPEN", "GeneratorPool"]

MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of a rollout; its tries differ in `rid` only."""

    rollout_id: str
    ids: "array[int]"
    params: dict[str, Any]
    asked: Asked
    timeout_s: float
    retry_s: float


class GeneratorPool:
    """The generators of one job, for one process: `max_concurrency` is what this process puts on each of them.

    Raises from `generate`:
        GeneratorError: the call failed and would fail again, or nothing could answer it for `retry_s`.
        MisalignedTokensError: an id of the prompt is not in the vocabulary; nothing was sent.
    """

    def __init__(self, specs: Iterable[GeneratorSpec], *, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._specs = list(specs)
        self._vocab_size = vocab_size
        self._stop_token_ids = tuple(stop_token_ids)
        self._members: dict[str, Member] = {}
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._aborts: set[asyncio.Task[None]] = set()
        self._labelled = False
        self._sick = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._session = open_session()
        self.update(self._specs)
        self._prober = asyncio.create_task(self._probe_forever(), name="generator prober")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._prober.cancel()
        try:
            await asyncio.wait([self._prober, *self._aborts])
        finally:
            await self._session.close()
        if not self._prober.cancelled():
            self._prober.result()  # it never ends by itself: let its error be seen

    def update(self, specs: Iterable[GeneratorSpec]) -> None:
        """Take on another set. What runs on a generator that left finishes there."""
        members = {}
        for spec in specs:
            member = self._members.get(spec.url) or Member(GeneratorClient(self._session, spec))
            if member.client.spec != spec:
                member.client = GeneratorClient(self._session, spec)
            members[spec.url] = member
        self._members = members
        self._wake(len(self._waiting))

    def take(self, weights: JobWeights) -> None:
        """Take up what is known of the generators' weights now; calls on what was put into quarantine come away from it."""
        known = {url: weights.generators.get(url, GeneratorWeights()) for url in self._members}
        if all(self._members[url].weights == now for url, now in known.items()) and self._labelled == (weights.current is not None):
            return  # as nearly always: then nobody who waits is woken
        self._labelled = weights.current is not None
        for url, member in self._members.items():
            for rid in member.take(known[url]):
                self._tell(member, rid)
        self._wake(len(self._waiting))

    def status(self) -> list[dict[str, Any]]:
        """One entry a generator, for people and metrics."""
        return [
            {
                "url": member.url,
                "well": not member.open,
                "standing": member.weights.standing,
                "running": len(member.running),
                "max_concurrency": member.client.spec.max_concurrency,
                "calls": member.calls,
                "errors": member.errors,
                "last_error": member.last_error,
            }
            for member in self._members.values()
        ]

    async def loads(self) -> list[Load | None] | None:
        """How busy each generator is; None: one of them has stopped for a weight update, when loads say nothing."""
        return await loads_of(self._members.values(), held=len(self._waiting))

    async def generate(
        self,
        *,
        rollout_id: str,
        ids: "Sequence[int] | array[int]",
        max_new_tokens: int,
        sampling: Sampling,
        version: int,
        lineage: int,
        timeout_s: float,
        retry_s: float = 300.0,
    ) -> Generation:
        """Sample up to `max_new_tokens` from `ids`.

        version, lineage: the job's now; taken where an engine's label names none. timeout_s: for one try. retry_s: for failing tries after
        the first and the pauses between them, and for waiting while no generator is well. finish `length` with fewer tokens than asked:
        the context or the KV pool is exhausted; `abort`: someone stopped it at the engine, the tokens so far are good.
        """
        prompt = self._checked_ids(ids)
        params = sampling_params(sampling, max_new_tokens=max_new_tokens, stop_token_ids=self._stop_token_ids)
        asked = Asked(
            rid="",
            prompt_tokens=len(prompt),
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_token_ids,
            version=version,
            lineage=lineage,
        )
        ask = Ask(rollout_id=rollout_id, ids=prompt, params=params, asked=asked, timeout_s=timeout_s, retry_s=retry_s)
        return await self._answer(ask)

    def _checked_ids(self, ids: "Sequence[int] | array[int]") -> "array[int]":
        """`ids` as int32, each inside the vocabulary: one outside would kill the engine for everybody."""
        try:
            prompt = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        except (OverflowError, TypeError) as error:
            raise MisalignedTokensError(f"the prompt is not a list of int32 token ids: {error}") from error
        if not prompt:
            raise MisalignedTokensError("the prompt has no token ids")
        unsigned = np.frombuffer(prompt, dtype=np.uint32)  # a negative id becomes a huge one
        if unsigned.max() >= self._vocab_size:
            at = int((unsigned >= self._vocab_size).argmax())
            raise MisalignedTokensError(f"token id {prompt[at]} at position {at} is outside the vocabulary of {self._vocab_size}")
        return prompt

    async def _answer(self, ask: Ask) -> Generation:
        """Try until one answers, at most `retry_s` of failing and pausing after the first failure; waiting for a place is not counted."""
        tries, last, patience_s = 0, None, ask.retry_s
        while True:
            member = await self._place(ask, last)
            started = time.monotonic()
            try:
                return await self._try(member, ask)
            except GeneratorError as error:
                pause = _pause_after(error, tries)
                patience_s -= pause + (time.monotonic() - started if last else 0.0)
                if not error.retryable or patience_s < 0:
                    raise GeneratorError(f"{member.url}: {error}", retryable=error.retryable) from error
                logger.info("rollout %s: %s: %s; tried again", ask.rollout_id, member.url, error)
            last, tries = member, tries + 1
            await asyncio.sleep(pause)

    async def _try(self, member: Member, ask: Ask) -> Generation:
        """One call in one place, which it gives back."""
        rid, started, stood_s = new_rid(), time.monotonic(), member.stood_s()
        asked = self._asked(member, ask, rid)  # of now: weights that move while it runs are newer
        member.calls += 1
        try:
            async with asyncio.timeout(None) as called_away:
                member.running[rid] = called_away
                try:
                    reply = await member.client.generate(
                        rid, ask.ids, params=ask.params, timeout_s=ask.timeout_s, routing_key=ask.rollout_id
                    )
                finally:
                    del member.running[rid]
                    self._wake(1)
            generation = checked(reply, asked)
        except GeneratorError as error:
            member.failed(error, time.monotonic())
            if member.open:
                self._sick.set()
            if isinstance(error, TimedOutGeneratorError):
                await self._abort(member, rid)
            raise
        except TimeoutError as error:
            await self._abort(member, rid)
            raise PulledError(f"out of service: {member.weights.why}", retryable=True) from error
        except asyncio.CancelledError:
            await self._abort(member, rid)
            raise
        if member.open:
            self._wake(len(self._waiting))
        member.succeeded()
        seconds = time.monotonic() - started - (member.stood_s() - stood_s)
        return replace(generation, generator=member.url, seconds=max(0.0, seconds))

    def _asked(self, member: Member, ask: Ask, rid: str) -> Asked:
        """What the reply is held against: the oldest weights are the job's, or the generator's own where those are older.

        Labels must name a version if they did when the call began: what it was sampled from before a first update is called "default".
        """
        job = (ask.asked.lineage, ask.asked.version)
        lineage, version = min(job, read_label(member.weights.label, lineage=job[0], version=job[1]))
        return replace(ask.asked, rid=rid, lineage=lineage, version=version, labelled=self._labelled)

    def _tell(self, member: Member, rid: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(member.client.abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    async def _abort(self, member: Member, rid: str) -> None:
        """Tell the engine, even while we are being cancelled; an engine notices a closed connection only after seconds."""
        await asyncio.shield(self._tell(member, rid))

    # ------------------------------------------------------------------------------------------------------------------- places

    async def _place(self, ask: Ask, last: Member | None) -> Member:
        """Wait for a member with a place. `last` failed this call before: taken again only if there is no other."""
        if not self._waiting and (member := self._choose(ask.rollout_id, last)):
            return member
        while True:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                async with asyncio.timeout(ask.retry_s):
                    await waiter
            except TimeoutError:
                if all(member.open for member in self._members.values()):
                    raise GeneratorError(self._illness(ask.retry_s), retryable=True) from None
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)  # the place that was offered to us goes on to the next
                raise
            finally:
                self._waiting.pop(waiter, None)
            if member := self._choose(ask.rollout_id, last):
                return member

    def _choose(self, rollout_id: str, last: Member | None) -> Member | None:
        """The home if it has a place, else the least loaded that has; `last` only where nothing else has."""
        free = [member for member in self._members.values() if member.has_place]
        others = [member for member in free if member is not last]
        if not others:
            return free[0] if free else None
        home = max(self._members.values(), key=lambda member: _score(member.url, rollout_id))
        return home if home in others else min(others, key=lambda member: member.load)

    def _wake(self, places: int) -> None:
        while places and self._waiting:
            waiter, _ = self._waiting.popitem(last=False)
            if not waiter.done():
                waiter.set_result(None)
                places -= 1

    def _illness(self, waited_s: float) -> str:
        found = ", ".join(f"{member.url} ({member.last_error})" for member in self._members.values())
        return f"no generator was well for {waited_s:g} s: {found}"

    # ------------------------------------------------------------------------------------------------------------------- health

    async def _probe_forever(self) -> None:
        """Ask generators whose breaker is open whether they are ready; those that are get one trial call."""
        while True:
            sick = [member for member in self._members.values() if member.open and not member.trial]
            if not sick:
                self._sick.clear()
                await self._sick.wait()
                continue
            await asyncio.sleep(max(0.0, min(member.probe_at for member in sick) - time.monotonic()))
            due = [member for member in sick if member.probe_at <= time.monotonic()]
            await asyncio.gather(*(self._probe(member) for member in due))

    async def _probe(self, member: Member) -> None:
        if await member.client.ready() and await self._has_its_label(member):
            member.trial = True
            self._wake(1)
        else:
            member.rest(time.monotonic())

    async def _has_its_label(self, member: Member) -> bool:
        """Whether the weights that came back are those that were there: a generator that was started anew has others, and another label."""
        if not self._labelled:
            return True
        try:
            label = (await member.client.info()).get("weight_version")
        except GeneratorError as error:
            member.last_error = str(error)
            return False
        expected = member.weights.label
        if not_older(label, expected) if expected is not None else names_version(label):
            return True
        member.last_error = f"its weight_version is {label!r}, not {expected or 'a version'} or newer: it waits for a weight update"
        return False


def _pause_after(error: GeneratorError, tries: int) -> float:
    asked_s = error.retry_after_s if isinstance(error, BusyGeneratorError) else 0.0
    return min(max(pause_s(tries), asked_s), MAX_RETRY_AFTER_S)


def _score(url: str, rollout_id: str) -> bytes:
    """Rendezvous hashing: each rollout ranks the generators its own way, and a lost one moves only its own rollouts."""
    return hashlib.blake2b(f"{url} {rollout_id}".encode(), digest_size=8).digest()
