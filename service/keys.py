"""Ids and Redis keys: every name that the store holds is made here.

What must always hold:

* An id tells its job (`<job>-g3-r0`), so that any look-up is one hash tag and never asks an index.
* Everything of a job lies in a fixed set of keys with the tag `{job_id}`, plus one journal list per rollout. Lua gets all of them as KEYS
  and builds none, so every step also runs on Redis Cluster, and jobs spread over its nodes.
"""

import re
import secrets
from dataclasses import dataclass, field

from service.errors import NotFoundError

JOBS = "rw:jobs"
"""Set of live job ids."""
DEPLOYMENT = "rw:deployment"
"""The id of everything that shares this store; see `Store.deployment_id`."""
WORKERS = "rw:workers"
"""Hash worker -> msgpack (info, until)."""
CONTROL = "rw:control"
"""Hash control URL -> the job that moves weights there."""
UNSETTLED = "rw:unsettled"
"""Set of jobs with a weight update that runs, or generators out of service."""

_ID = re.compile(r"(?P<job>j[0-9a-f]{16})(?:(?P<group>-g[1-9][0-9]{0,14})(?P<rollout>-r[0-9]{1,4})?|-[bu][1-9][0-9]{0,14})?")


def names(tenant: str) -> str:
    """Hash name -> job id of a tenant's live jobs."""
    return f"rw:names:{tenant}"


def synced(tag: str) -> str:
    """What is written before a wait for the disk, where the keys of this tag are; or the one key of this name."""
    return f"rw:{{{tag}}}:synced"


def new_job_id() -> str:
    return "j" + secrets.token_hex(8)


def group_id(job_id: str, n: int) -> str:
    return f"{job_id}-g{n}"


def rollout_id(group: str, index: int) -> str:
    return f"{group}-r{index}"


def batch_id(job_id: str, n: int) -> str:
    return f"{job_id}-b{n}"


def missing(an_id: str) -> NotFoundError:
    """The one answer for what is not there and for what is another tenant's."""
    return NotFoundError(f"there is no {an_id[:80]!r}")


def _parse(any_id: str) -> re.Match[str]:
    found = _ID.fullmatch(any_id)
    if found is None:
        raise missing(any_id)
    return found


def job_of(any_id: str) -> str:
    """Raises NotFoundError for what is no id."""
    return _parse(any_id)["job"]


def group_of(rollout: str) -> str:
    """Raises NotFoundError for what is no rollout id."""
    found = _parse(rollout)
    if found["rollout"] is None:
        raise missing(rollout)
    return rollout[: found.end("group")]


def index_of(rollout: str) -> int:
    """Index of a rollout in its group. Raises NotFoundError for what is no rollout id."""
    return int(rollout[len(group_of(rollout)) + 2 :])


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Every key of one job. `all` is the order in which each script gets them (service/lua/state.lua names them so)."""

    job_id: str
    all: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all", tuple(f"rw:{{{self.job_id}}}:{part}" for part in PARTS))

    @property
    def job(self) -> str:
        """Hash: spec, gate, policy version, lineage, weights and their updates, counters for ids and fences."""
        return self.all[0]

    @property
    def counts(self) -> str:
        """Hash: groups by state and reason, tokens."""
        return self.all[1]

    @property
    def groups(self) -> str:
        """Hash group id -> record."""
        return self.all[2]

    @property
    def rollouts(self) -> str:
        """Hash rollout id -> record; from the first dispatch of its group on."""
        return self.all[3]

    @property
    def fences(self) -> str:
        """Hash rollout id -> fence of the current lease."""
        return self.all[4]

    @property
    def backlog(self) -> str:
        """Zset of queued groups."""
        return self.all[5]

    @property
    def pending(self) -> str:
        """Zset of dispatched rollouts that no worker holds."""
        return self.all[6]

    @property
    def leases(self) -> str:
        """Zset rollout id -> unix time at which its lease runs out."""
        return self.all[7]

    @property
    def charged(self) -> str:
        """Set of groups that hold a place of the gate."""
        return self.all[8]

    @property
    def ready(self) -> str:
        """Zset of complete groups, oldest policy first."""
        return self.all[10]

    @property
    def batches(self) -> str:
        """Hash batch id -> record."""
        return self.all[11]

    @property
    def batch_leases(self) -> str:
        """Zset batch id -> unix time at which the trainer's lease runs out."""
        return self.all[12]

    @property
    def tasks(self) -> str:
        """Hash group id -> compressed task."""
        return self.all[13]

    @property
    def ended(self) -> str:
        """Zset of tombstones by the time of their end."""
        return self.all[14]

    @property
    def requests(self) -> str:
        """Hash request key -> answer."""
        return self.all[15]

    @property
    def order(self) -> str:
        """Zset of all groups by number."""
        return self.all[16]

    @property
    def sampled(self) -> str:
        """Hash rollout id -> tokens that its current attempt has journaled."""
        return self.all[17]

    @property
    def ledger(self) -> str:
        """Hash: what became of sampled tokens (service/ledger.py)."""
        return self.all[18]

    @property
    def rates(self) -> str:
        """Hash: a ring of sums by time, and what the trainer does (service/throughput.py)."""
        return self.all[19]

    @property
    def oldest(self) -> str:
        """Zset of rollouts that run and ready groups, by the lineage and version of their oldest sampled token."""
        return self.all[20]

    @property
    def solve_rates(self) -> str:
        """Hash task id -> sums over its groups."""
        return self.all[21]

    @property
    def solve_order(self) -> str:
        """Zset of tasks by the number of their last change."""
        return self.all[22]

    @property
    def driver(self) -> str:
        """Which gateway drives the job's weight update; goes by itself when that one dies."""
        return f"rw:{{{self.job_id}}}:driver"

    @property
    def synced(self) -> str:
        """What is written before a wait for the disk; goes by itself."""
        return synced(self.job_id)

    def journal(self, rollout: str) -> str:
        """List of the entries of a rollout's current attempt."""
        return f"rw:{{{self.job_id}}}:t:{rollout}"

    def journals(self, group: str, size: int) -> list[str]:
        """The journals of a group's members, by index."""
        return [self.journal(rollout_id(group, index)) for index in range(size)]


PARTS = (
    "job",
    "counts",
    "groups",
    "rollouts",
    "fences",
    "backlog",
    "pending",
    "leases",
    "charged",
    "spent",
    "ready",
    "batches",
    "batch_leases",
    "tasks",
    "ended",
    "requests",
    "order",
    "sampled",
    "ledger",
    "rates",
    "oldest",
    "solve_rates",
    "solve_order",
)
"""The order of KEYS. `spent`: zset of acked groups whose place waits for the version to pass the score."""
