"""How busy generators are, as they say themselves or, where they say nothing, as we know."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from service.concurrency import Load
from service.errors import GeneratorError
from service.generator_member import Member
from service.generators import BusyGeneratorError, NotFoundHereError, TimedOutGeneratorError
from service.weight_records import Standing


async def loads_of(members: Iterable[Member], *, held: int) -> list[Load | None] | None:
    """One a generator; None in its place: it is unwell or in quarantine. None: an update is on, when loads say nothing.

    held: calls of this process that wait for a place at one of them; others hold calls in the same measure, as far as we can know.
    """
    members = list(members)
    if any(_stopped_for_update(member) for member in members):
        return None
    found = await asyncio.gather(*(_load_of(member) for member in members))
    here = sum(len(member.running) for member in members)
    per_running = held / max(1, here)
    return [load and replace(load, waiting=load.waiting + round(load.running * per_running)) for load in found]


def _stopped_for_update(member: Member) -> bool:
    standing = member.weights.standing
    return standing is Standing.HELD or (member.weights.paused and standing is not Standing.QUARANTINED)


async def _load_of(member: Member) -> Load | None:
    """It is asked even where calls of this process have failed of late: workers shall agree on what is lost, whichever of them decides."""
    if member.weights.standing is Standing.QUARANTINED:
        return None
    try:
        return told(await member.client.loads())
    except (NotFoundHereError, TimedOutGeneratorError, BusyGeneratorError):  # a router, older than 0.5.9, or very busy
        return None if member.open else Load(running=len(member.running), waiting=0, usage=0.0)
    except GeneratorError:
        return None


def told(ranks: Sequence[Any]) -> Load:
    """What the ranks of `/v1/loads` come to; what is not said is 0."""
    entries = [rank for rank in ranks if isinstance(rank, dict)]
    return Load(
        running=int(sum(_number(entry, "num_running_reqs") for entry in entries)),
        waiting=int(sum(_number(entry, "num_waiting_reqs") for entry in entries)),
        usage=min(1.0, max((_number(entry, "token_usage") for entry in entries), default=0.0)),
    )


def _number(entry: dict[str, Any], name: str) -> float:
    value = entry.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0
