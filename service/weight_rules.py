"""Weight updates as rules: which state follows which event, and which generators may be used meanwhile. Pure: values in, values out.

An update of a job: pausing -> paused (the trainer moves weights) -> loading (labels are set, generators go on) -> done; or failed, from
any of the first three. With `from_disk` nobody waits in between: the service itself moves the weights.

What always holds:
* at most one update of a job runs;
* a generator serves only under a label that is true: what missed an update, or may hold weights that nobody vouches for, is quarantined,
  and leaves quarantine only when its label was read and is the one that it must have (`may_serve`);
* weights can have moved on a generator only from the moment on that the trainer was told `paused`, or a load was about to be sent; that
  moment is stored before it comes;
* an event that comes late, for an update that is over, changes no update.
"""

from collections.abc import Collection, Mapping

import msgspec

from service.errors import ConflictError
from service.generation_reply import not_older
from service.weight_records import GeneratorWeights, JobWeights, Part, Said, Standing, UpdateState, Wanted, WeightUpdate

BUSY_S = 1.0
"""`Retry-After` of conflicts that pass by themselves."""


# ------------------------------------------------------------------------------------------------------------------ what clients do


def begin(
    weights: JobWeights, wanted: Wanted, *, job_id: str, policy: tuple[int, int], labels: Mapping[str, str | None], now: float
) -> JobWeights:
    """A new update of the generators that `labels` names (each with the label it has now; None: it did not say). The same request again
    changes nothing.

    policy: (lineage, version) of the job.

    Raises:
        ConflictError: another one runs, or the version goes backwards.
    """
    if wanted.request is not None and weights.update is not None and weights.update.request == wanted.request:
        return weights
    if weights.running is not None:
        told = f"update {weights.running.update_id} is {weights.running.state}; finish or abandon it, or wait for it"
        raise ConflictError(told, retry_after_s=BUSY_S)
    lineage, version = policy
    if wanted.version < version and not wanted.rollback:
        told = f"version {wanted.version} is below the current {version}; a trainer that restarted from a checkpoint says rollback: true"
        raise ConflictError(told)
    known = {url: weights.generators.get(url, GeneratorWeights()) for url in labels}
    update = WeightUpdate(
        update_id=f"{job_id}-u{weights.count + 1}",
        n=weights.count + 1,
        version=wanted.version,
        lineage=lineage + wanted.rollback,
        rollback=wanted.rollback,
        from_disk=wanted.from_disk,
        mode=wanted.mode,
        flush_cache=wanted.flush_cache,
        timeout_s=wanted.timeout_s,
        began_at=now,
        deadline=now + wanted.timeout_s,
        parts={url: Part(doubted=generator.moved) for url, generator in known.items()},
        request=wanted.request,
    )
    again = weights.update is not None and weights.update.label == update.label
    generators = {url: _held(known[url], label, lineage, proven=not again and label != update.label) for url, label in labels.items()}
    return _with(weights, update=update, generators=generators, count=update.n)


def _held(generator: GeneratorWeights, label: str | None, lineage: int, *, proven: bool) -> GeneratorWeights:
    """Quarantine outlives the beginning of an update, with the label that was known then: what is said meanwhile vouches for nothing.

    proven: the update's label can come from no load of before.
    """
    if generator.standing is Standing.QUARANTINED:
        return _as(generator, unprovable=generator.moved and (generator.unprovable or not proven))
    if label is not None:
        generator = _as(generator, label=label, lineage=lineage)
    return _as(generator, standing=Standing.HELD, why="")


def finish(weights: JobWeights, update_id: str, *, now: float) -> JobWeights:
    """The trainer has moved the weights. Again changes nothing.

    Raises:
        ConflictError: it was not paused yet (comes by itself), failed, or loads from disk, which needs no finish.
    """
    update = _named(weights, update_id)
    if update.from_disk is not None:
        raise ConflictError(f"update {update_id} loads from disk and finishes by itself; ask for its state")
    match update.state:
        case UpdateState.LOADING | UpdateState.DONE:
            return weights
        case UpdateState.FAILED:
            raise ConflictError(f"update {update_id} has failed ({update.reason}); begin another one and send the weights again")
        case UpdateState.PAUSING:
            raise ConflictError(
                f"update {update_id} is still pausing generators; weights move only once it is paused", retry_after_s=BUSY_S
            )
    return _with(weights, update=_as_update(_entered(update, UpdateState.LOADING, now), finished=True))


def abandon(weights: JobWeights, update_id: str, said: Said, *, now: float) -> JobWeights:
    """The trainer gives up, and says whether weights moved. Also of an update that failed for want of an answer. Again changes nothing.

    Raises:
        ConflictError: it is loading or done, or the other was said before (finish says moved), or another update began since.
    """
    update = _named(weights, update_id)
    if update.said is not None:
        if update.said != said:
            raise ConflictError(f"update {update_id} was abandoned with weights {update.said!r}; load them anew to be sure of them")
        return weights
    match update.state:
        case UpdateState.LOADING:
            raise ConflictError(f"update {update_id} is loading and ends by itself", retry_after_s=BUSY_S)
        case UpdateState.DONE:
            raise ConflictError(f"update {update_id} is done; begin another one to go back")
        case UpdateState.PAUSING | UpdateState.PAUSED:
            weights = _failed(weights, f"abandoned: weights {said}", moved=said == "moved", now=now)
    assert weights.update is not None
    update = _as_update(weights.update, said=said)
    return _with(weights, update=update, generators=_believed(weights, update) if said == "untouched" else weights.generators)


def _believed(weights: JobWeights, update: WeightUpdate) -> dict[str, GeneratorWeights]:
    """The generators, without the doubt that this update brought: the trainer, who alone can have moved their weights, did not."""
    believed = dict(weights.generators)
    for url, part in update.parts.items():
        generator = weights.generators.get(url)
        if generator is None or not generator.moved or part.doubted:
            continue
        if update.from_disk is not None:
            raise ConflictError(f"update {update.update_id} failed while it loaded from disk: weights may have moved; load them anew")
        if update.finished:
            raise ConflictError(f"update {update.update_id} failed after finish: weights have moved, as you said then; load them anew")
        believed[url] = _as(generator, standing=Standing.HELD, moved=False)
    return believed


def _named(weights: JobWeights, update_id: str) -> WeightUpdate:
    if weights.update is None or weights.update.update_id != update_id:
        raise ConflictError(f"update {update_id} is over, and another one began since")
    return weights.update


# ------------------------------------------------------------------------------------------------------------------ what generators do


def paused(weights: JobWeights, update_id: str, url: str, *, now: float) -> JobWeights:
    """A generator stands still; also where the update is over by now, and somebody has to let it go on."""
    generator = weights.generators.get(url)
    if generator is None:
        return weights
    standing = Standing.HELD if generator.standing is Standing.SERVING else generator.standing
    generator = _as(generator, standing=standing, paused=True, paused_at=generator.paused_at if generator.paused else now)
    return _with(_part(weights, update_id, url, UpdateState.PAUSED), generators={**weights.generators, url: generator})


def missed(weights: JobWeights, update_id: str, url: str, why: str) -> JobWeights:
    """A generator could not be brought along. Whether its weights may have moved follows from how far the update was."""
    update = weights.running
    if update is None or update.update_id != update_id or url not in weights.generators:
        return weights
    part = update.parts.get(url, Part())
    may_have = update.state is UpdateState.PAUSED or (
        update.state is UpdateState.LOADING and (update.from_disk is None or part.state is UpdateState.LOADING)
    )
    generator = weights.generators[url]
    generator = _as(generator, standing=Standing.QUARANTINED, moved=generator.moved or may_have, why=why)
    return _with(_part(weights, update_id, url, UpdateState.FAILED, why), generators={**weights.generators, url: generator})


def all_asked(weights: JobWeights, update_id: str, *, now: float) -> JobWeights:
    """Every generator was asked to pause: those that did take the next step; with none, the update has failed and nothing moved.

    From here on weights may move, so a load marks each part before it is sent.
    """
    update = weights.running
    if update is None or update.update_id != update_id or update.state is not UpdateState.PAUSING:
        return weights
    standing_still = [url for url, part in update.parts.items() if part.state is UpdateState.PAUSED]
    if not standing_still:
        return _failed(weights, "no generator could be paused", moved=False, now=now)
    if update.from_disk is None:
        return _with(weights, update=_entered(update, UpdateState.PAUSED, now))
    parts = {url: _as_part(part, UpdateState.LOADING) if url in standing_still else part for url, part in update.parts.items()}
    return _with(weights, update=_as_update(_entered(update, UpdateState.LOADING, now), parts=parts))


def untouched(weights: JobWeights, update_id: str, url: str, why: str) -> JobWeights:
    """A generator refused the weights before it took any: it missed the update, and is what it was."""
    return missed(_part(weights, update_id, url, UpdateState.PAUSED), update_id, url, why)


def serving(weights: JobWeights, update_id: str, url: str, *, now: float) -> JobWeights:
    """A generator has the new weights, its label says so, and it goes on."""
    update = weights.running
    if update is None or update.update_id != update_id or url not in weights.generators:
        return weights
    weights = _part(weights, update_id, url, UpdateState.DONE)
    generator = _as(weights.generators[url], label=update.label, moved=False, unprovable=False)
    return _resumed(_with(weights, generators={**weights.generators, url: generator}), url, now=now)


def close(weights: JobWeights, update_id: str, *, now: float) -> JobWeights:
    """Every generator was brought along or has missed it. Done if any was brought along."""
    update = weights.running
    if update is None or update.update_id != update_id or update.state is not UpdateState.LOADING:
        return weights
    if not any(part.state is UpdateState.DONE for part in update.parts.values()):
        reasons = {part.detail for part in update.parts.values() if part.detail}
        return _failed(weights, f"no generator took the weights: {'; '.join(sorted(reasons))[:500]}", moved=False, now=now)
    return _with(weights, update=_as_update(update, state=UpdateState.DONE, ended_at=now), current=update.label)


def expire(weights: JobWeights, *, now: float) -> JobWeights:
    """The phase's time is over. A trainer that was told `paused` and fell silent may have moved weights."""
    update = weights.running
    if update is None or now < update.deadline or update.state is not UpdateState.PAUSED:
        return weights
    told = f"not finished within {update.timeout_s:g} s: whoever moved the weights may be dead"
    return _failed(weights, told, moved=True, now=now)


def _failed(weights: JobWeights, reason: str, *, moved: bool, now: float) -> JobWeights:
    """The update is over. What it held comes back by its label (`may_serve`); where weights may have moved, from quarantine."""
    update = weights.update
    assert update is not None
    generators = dict(weights.generators)
    for url, part in update.parts.items():
        generator = generators.get(url)
        if generator is None or part.state in (UpdateState.DONE, UpdateState.FAILED):
            continue
        standing = Standing.QUARANTINED if moved else generator.standing
        generators[url] = _as(generator, standing=standing, moved=generator.moved or moved, why=reason)
    return _with(weights, generators=generators, update=_as_update(update, state=UpdateState.FAILED, reason=reason, ended_at=now))


# ------------------------------------------------------------------------------------------------------------------ who may serve


def may_serve(weights: JobWeights, url: str, found: str | None) -> bool:
    """Whether a generator out of service whose label is now `found` may serve again.

    The label must be the job's current one, or the one that the generator had, if it had missed nothing by then (a trainer may label its
    generators itself, between updates). Where weights may have moved, its old label proves nothing: only another one does.
    """
    generator, current = weights.generators[url], weights.current
    if generator.moved:
        return current is not None and found == current and found != generator.label and not generator.unprovable
    if found is None or generator.label is None:
        return found is not None and current in (None, found)
    return found == current or (found == generator.label and (current is None or not_older(found, current, lineage=generator.lineage)))


def readmitted(weights: JobWeights, url: str, found: str | None, *, now: float) -> JobWeights:
    """A generator out of service was found to have the right label, and goes on. Not while an update runs: that one takes it along."""
    generator = weights.generators.get(url)
    if generator is None or generator.standing is Standing.SERVING or weights.running or not may_serve(weights, url, found):
        return weights
    weights = _with(weights, generators={**weights.generators, url: _as(generator, label=found, moved=False)})
    return _resumed(weights, url, now=now)


def _resumed(weights: JobWeights, url: str, *, now: float) -> JobWeights:
    generator = weights.generators.get(url)
    if generator is None:
        return weights
    stood_s = generator.paused_s + (max(0.0, now - generator.paused_at) if generator.paused else 0.0)
    generator = _as(generator, standing=Standing.SERVING, why="", paused=False, paused_at=0.0, paused_s=stood_s)
    return _with(weights, generators={**weights.generators, url: generator})


def without(weights: JobWeights, urls: Collection[str]) -> JobWeights:
    """The job no longer has these generators."""
    return _with(weights, generators={url: generator for url, generator in weights.generators.items() if url not in urls})


# ------------------------------------------------------------------------------------------------------------------ changed copies


def _part(weights: JobWeights, update_id: str, url: str, state: UpdateState, detail: str = "") -> JobWeights:
    update = weights.running
    if update is None or update.update_id != update_id or url not in update.parts:
        return weights
    return _with(weights, update=_as_update(update, parts={**update.parts, url: _as_part(update.parts[url], state, detail)}))


def _entered(update: WeightUpdate, state: UpdateState, now: float) -> WeightUpdate:
    return _as_update(update, state=state, deadline=now + update.timeout_s)


def _with(weights: JobWeights, **changes: object) -> JobWeights:
    return msgspec.structs.replace(weights, **changes)


def _as(generator: GeneratorWeights, **changes: object) -> GeneratorWeights:
    return msgspec.structs.replace(generator, **changes)


def _as_part(part: Part, state: UpdateState, detail: str = "") -> Part:
    return msgspec.structs.replace(part, state=state, detail=detail)


def _as_update(update: WeightUpdate, **changes: object) -> WeightUpdate:
    return msgspec.structs.replace(update, **changes)
