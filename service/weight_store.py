"""What a job's weights are and who may move them, in the store: one record a job, changed only as a whole and only from what was read.

What always holds: a change that two make at once is made by one after the other; a control URL belongs to one job; an update that is over
stays readable among the last `KEPT`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec

from service import keys
from service.errors import ConflictError, NotFoundError
from service.generators import control_urls
from service.records import GeneratorSpec, JobSpec
from service.stale_work import stop_stale
from service.store import Argument, Store, unavailable
from service.weight_records import JobWeights, WeightUpdate, decode, encode

KEPT = 16
"""Updates of a job that can still be asked for."""

_update_decoder = msgspec.json.Decoder(WeightUpdate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A job as far as its weights go."""

    job_id: str
    weights: JobWeights
    raw: bytes
    spec: JobSpec
    raw_spec: bytes
    version: int
    lineage: int
    tenant: str


Change = Callable[[Known], JobWeights]


class WeightStore:
    """Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By job: many generators of one answer at once, and of changes side by side all but one are in vain."""

    async def read(self, job_id: str) -> JobWeights:
        """The weights alone: what workers ask for again and again."""
        with unavailable():
            return decode(await self._store.redis.hget(keys.JobKeys(job_id).job, "weights"))

    async def known(self, job_id: str) -> Known:
        """Raises NotFoundError when the job is gone."""
        known = await self._known(job_id, tombstone=False)
        if known is None:
            raise keys.missing(job_id)
        return known

    async def tombstone(self, job_id: str) -> Known | None:
        """What a deleted job was; None where nothing is left of it."""
        return await self._known(job_id, tombstone=True)

    async def _known(self, job_id: str, *, tombstone: bool) -> Known | None:
        fields = ("spec", "weights", "version", "lineage", "tenant", "deleted")
        with unavailable():
            spec, raw, version, lineage, tenant, deleted = await self._store.redis.hmget(keys.JobKeys(job_id).job, *fields)
        if spec is None or (deleted != b"0" and not tombstone):
            return None
        return Known(
            job_id=job_id,
            weights=decode(raw),
            raw=raw or b"",
            spec=JobSpec.model_validate_json(spec),
            raw_spec=spec,
            version=int(version),
            lineage=int(lineage),
            tenant=tenant.decode(),
        )

    async def change(self, job_id: str, change: Change, *, same_spec: bool = False) -> JobWeights:
        """Make `change` of what is there now, as often as others come in between; the weights after it.

        An update that ends done publishes its version in the same step. same_spec: not while the job's spec changes.

        Raises:
            NotFoundError: the job is gone.
        """
        async with self._turns.setdefault(job_id, asyncio.Lock()):
            before, weights = await self._changed(job_id, change, same_spec=same_spec)
        if (weights.update and weights.update.state) != (before.update and before.update.state):
            await self._store.to_disk(keys.JobKeys(job_id))
            await stop_stale(self._store, job_id)
        return weights

    async def _changed(self, job_id: str, change: Change, *, same_spec: bool) -> tuple[JobWeights, JobWeights]:
        """What was, and what is."""
        while True:
            known = await self.known(job_id)
            weights = change(known)
            if weights == known.weights:
                return weights, weights
            if weights.unsettled and not known.weights.unsettled:
                await self.attend(job_id)
            args = _arguments(known, weights, same_spec=same_spec)
            reply = await self._store.script("weights_write")(keys.JobKeys(job_id), args)
            if reply["status"] == "missing":
                raise keys.missing(job_id)
            if reply["status"] == "ok":
                return known.weights, weights

    async def update(self, update_id: str) -> WeightUpdate:
        """An update, as it is or as it ended. Raises NotFoundError: there is none, or it was long ago."""
        job_id = keys.job_of(update_id)
        known = await self.known(job_id)
        if known.weights.update is not None and known.weights.update.update_id == update_id:
            return known.weights.update
        with unavailable():
            raw = await self._store.redis.hget(keys.JobKeys(job_id).job, f"update:{update_id.rpartition('-u')[2]}")
        if raw is None:
            raise keys.missing(update_id)
        return _update_decoder.decode(raw)

    async def unsettled(self) -> list[str]:
        """Jobs that need a driver."""
        with unavailable():
            return sorted(member.decode() for member in await self._store.redis.smembers(keys.UNSETTLED))

    async def attend(self, job_id: str) -> None:
        """Some driver shall look at the job."""
        with unavailable():
            await self._store.redis.sadd(keys.UNSETTLED, job_id)
        await self._store.names_to_disk(keys.UNSETTLED)

    async def settled(self, job_id: str) -> None:
        """Nothing is left to be driven; unless something began meanwhile."""
        with unavailable():
            await self._store.redis.srem(keys.UNSETTLED, job_id)
            try:
                weights = (await self.known(job_id)).weights
            except NotFoundError:
                return
            if weights.unsettled:
                await self.attend(job_id)

    async def drive(self, job_id: str, driver: str, *, ttl_s: float) -> bool:
        """Take or renew the right to drive a job's update; 0 gives it up. Whether it is ours."""
        script = self._store.script("weights_drive")
        return bool(await self._store.evaluate(script, [keys.JobKeys(job_id).driver], [driver, int(ttl_s * 1000)]))

    # ------------------------------------------------------------------------------------------------------------------ claims

    async def claim(self, job_id: str, specs: Iterable[GeneratorSpec]) -> None:
        """Make the job the one that moves weights on these generators.

        Raises:
            ConflictError: another job does, on one of them. Whose it is is not told.
        """
        urls = sorted({canonical(url) for spec in specs for url in control_urls(spec)})
        while True:
            taken = await self._store.evaluate(self._store.script("weights_claim"), [keys.CONTROL], [job_id, *urls])
            if not taken:
                await self._store.names_to_disk(keys.CONTROL)
                return
            url, owner = (part.decode() for part in taken)
            if await self._lives(owner):
                told = f"another job moves the weights of the generator at {url}"
                raise ConflictError(f"{told}; a generator takes them from one job at a time: delete that job, or PATCH its generators")
            await self._release(owner, [url])

    async def keep(self, job_id: str, urls: Iterable[str]) -> None:
        """Give up all that the job has but these."""
        kept = set(map(canonical, urls))
        await self._release(job_id, [url for url in await self.claimed(job_id) if url not in kept])

    async def _release(self, job_id: str, names: Sequence[str]) -> None:
        if names:
            await self._store.evaluate(self._store.script("weights_release"), [keys.CONTROL], [job_id, *names])

    async def claimed(self, job_id: str) -> frozenset[str]:
        """The control URLs that the job has, each in its one spelling."""
        with unavailable():
            owners = await self._store.redis.hgetall(keys.CONTROL)
        return frozenset(url.decode() for url, owner in owners.items() if owner.decode() == job_id)

    async def _lives(self, job_id: str) -> bool:
        with unavailable():
            return bool(await self._store.redis.hget(keys.JobKeys(job_id).job, "deleted") == b"0")


def canonical(url: str) -> str:
    """One spelling of what is one place."""
    parts = urlsplit(url.rstrip("/"))
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{parts.scheme}://{parts.hostname}:{port}{parts.path}"


def _arguments(known: Known, weights: JobWeights, *, same_spec: bool) -> list[Argument]:
    update, before = weights.update, known.weights.update
    running = update.update_id if update is not None and not update.state.over else ""
    replaced = before if before is not None and update is not None and before.update_id != update.update_id else None
    ended: list[Argument] = [f"update:{replaced.n}", msgspec.json.encode(replaced)] if replaced else ["", ""]
    forgotten = f"update:{replaced.n - KEPT}" if replaced and replaced.n > KEPT else ""
    ends = update is not None and weights.current is not None and update.state == "done" and before is not None and before.state != "done"
    publish: list[Argument] = [update.version, int(update.rollback)] if ends and update is not None else ["", "0"]
    return [known.raw, encode(weights), known.raw_spec if same_spec else "", running, *ended, forgotten, *publish, known.lineage]
