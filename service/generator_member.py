"""One generator of a pool, as one process sees it: health, calls, and what it may be used for while weights move. No I/O of its own."""

import asyncio
import random
import time

from service.errors import GeneratorError
from service.generation_reply import UnlabelledError
from service.generators import BusyGeneratorError, GeneratorClient
from service.weight_records import GeneratorWeights, Standing

FAILURES_TO_OPEN = 3
"""One closed keep-alive connection is no illness."""

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
"""Between tries of one call, and between probes of one generator: doubling, with jitter."""

PULL_S = 10.0
"""For a call on a quarantined generator to come back with what it sampled; one on weights that nobody vouches for is not waited for."""


class PulledError(GeneratorError):
    """The call's generator was taken out of service: the call goes elsewhere."""


class Member:
    """One generator in the pool."""

    def __init__(self, client: GeneratorClient) -> None:
        self.client = client
        self.weights = GeneratorWeights()
        self.running: dict[str, asyncio.Timeout] = {}
        """Request id -> what ends the call when the generator is taken out of service."""
        self.failures = 0
        """In a row; the breaker is open from FAILURES_TO_OPEN on."""
        self.trial = False
        """Half open: one call may show that it is well again."""
        self.probes = 0
        self.probe_at = 0.0
        self.calls = 0
        self.errors = 0
        self.last_error = ""

    @property
    def url(self) -> str:
        return self.client.spec.url

    @property
    def open(self) -> bool:
        return self.failures >= FAILURES_TO_OPEN

    @property
    def has_place(self) -> bool:
        limit = self.client.spec.max_concurrency if not self.open else int(self.trial)
        return self.weights.standing is Standing.SERVING and len(self.running) < limit

    @property
    def load(self) -> float:
        return len(self.running) / self.client.spec.max_concurrency

    def stood_s(self) -> float:
        """How long it has stood still for weight updates so far, as far as is known here."""
        now = max(0.0, time.time() - self.weights.paused_at) if self.weights.paused else 0.0
        return self.weights.paused_s + now

    def take(self, weights: GeneratorWeights) -> list[str]:
        """Take up what is known of its weights now. Returns the calls to be aborted: it was put into quarantine.

        They come back with what they sampled; where the weights are in doubt at once and with nothing, since no label would be true.
        """
        before, self.weights = self.weights, weights
        if weights.standing is not Standing.QUARANTINED or (before.standing is Standing.QUARANTINED and weights.moved <= before.moved):
            return []
        ends_at = asyncio.get_running_loop().time() + (0.0 if weights.moved else PULL_S)
        pulled = [rid for rid, deadline in self.running.items() if not deadline.expired()]
        for rid in pulled:
            self.running[rid].reschedule(ends_at)
        return pulled

    def succeeded(self) -> None:
        self.failures, self.trial, self.probes = 0, False, 0

    def failed(self, error: GeneratorError, now: float) -> None:
        self.errors += 1
        self.last_error = str(error)
        if isinstance(error, BusyGeneratorError | PulledError) or not error.retryable:
            return  # it answers; the fault is the load's, the weights' or the call's
        self.failures = max(self.failures + 1, FAILURES_TO_OPEN if isinstance(error, UnlabelledError) else 0)
        if self.trial or self.failures == FAILURES_TO_OPEN:
            self.rest(now)

    def rest(self, now: float) -> None:
        """Ask again later, and later each time."""
        self.trial = False
        self.probe_at = now + pause_s(self.probes)
        self.probes += 1


def pause_s(tries: int) -> float:
    """How long to wait after the nth failure (from 0): doubling, capped, with jitter so that callers do not return together."""
    return min(FIRST_PAUSE_S * 2.0 ** min(tries, 10), MAX_PAUSE_S) * random.uniform(0.5, 1.0)
