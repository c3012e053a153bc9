"""How many tokens a rollout samples: a lognormal, or lengths that were measured.

Both answer what the closed forms need exactly: the mean of the k-th shortest of n, of which the tail multiplier is the case k = n.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.plan.errors import PlanError

Floats = NDArray[np.float64]

MAX_SIGMA = 3.0
"""A lognormal beyond it has a mean that no sample of a useful size comes near."""
_NORMAL = NormalDist()
_EDGES = np.linspace(-9.0, 12.0, 8401)
"""In standard deviations; a length beyond the last one has no weight in double precision."""
_BELOW = np.array([_NORMAL.cdf(edge) for edge in _EDGES])


class Lengths(Protocol):
    """A distribution of sampled tokens of one rollout."""

    @property
    def mean(self) -> float: ...

    def ordered_mean(self, k: int, n: int) -> float:
        """The mean of the k-th shortest of n independent lengths."""
        ...

    def quantile(self, p: float) -> float: ...

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats: ...

    def capped(self, at: float) -> "Lengths":
        """The same, cut off at so many tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """`uncut_mean` is the mean before `cap` cuts."""

    uncut_mean: float
    sigma: float
    cap: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.uncut_mean) and self.uncut_mean > 0):
            raise PlanError("mean-tokens", f"{self.uncut_mean:g} is no length; give a positive number of tokens")
        if not 0 <= self.sigma <= MAX_SIGMA:
            raise PlanError("sigma", f"{self.sigma:g} is outside 0..{MAX_SIGMA:g}; 0.3 is even, 0.8 has a long tail")
        if not self.cap > 0:
            raise PlanError("max-tokens", f"{self.cap:g} cuts every rollout to nothing; give a positive number of tokens")

    @property
    def _mu(self) -> float:
        return math.log(self.uncut_mean) - self.sigma**2 / 2

    @property
    def mean(self) -> float:
        return self.uncut_mean if math.isinf(self.cap) else self.ordered_mean(1, 1)

    def ordered_mean(self, k: int, n: int) -> float:
        middles = (_EDGES[1:] + _EDGES[:-1]) / 2
        return float(np.minimum(np.exp(self._mu + self.sigma * middles), self.cap) @ np.diff(at_least(k, n, _BELOW)))

    def quantile(self, p: float) -> float:
        return min(self.cap, math.exp(self._mu + self.sigma * _NORMAL.inv_cdf(p)))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return np.minimum(rng.lognormal(self._mu, self.sigma, shape), self.cap)

    def capped(self, at: float) -> "Lognormal":
        return Lognormal(uncut_mean=self.uncut_mean, sigma=self.sigma, cap=min(at, self.cap))


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Lengths as they were measured; each is as likely as the others."""

    values: Floats = field(repr=False)

    def __post_init__(self) -> None:
        if self.values.size == 0 or not np.all(np.isfinite(self.values)) or self.values.min() <= 0:
            raise PlanError("lengths", "the file has no lengths, or some that are not positive; give one positive number a line")
        object.__setattr__(self, "values", np.sort(self.values))

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    def ordered_mean(self, k: int, n: int) -> float:
        below = np.linspace(0.0, 1.0, self.values.size + 1)
        return float(self.values @ np.diff(at_least(k, n, below)))

    def quantile(self, p: float) -> float:
        return float(np.quantile(self.values, p))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.choice(self.values, shape)

    def capped(self, at: float) -> "Measured":
        return Measured(np.minimum(self.values, at))


def at_least(k: int, n: int, p: Floats) -> Floats:
    """The probability that k or more of n independent things happen, each with probability `p`."""
    if k == n:
        return p**n
    sure = p >= 1.0
    with np.errstate(divide="ignore"):
        happens, fails = np.log(p), np.log1p(-np.where(sure, 0.0, p))
    total = np.zeros_like(p)
    for j in range(k, n + 1):  # in logarithms: the binomials of large groups leave the floats
        ways = math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1)
        total += np.exp(ways + j * happens + (n - j) * fails)
    return np.where(sure, 1.0, np.minimum(total, 1.0))


def tail_multiplier(lengths: Lengths, group_size: int) -> float:
    """M = E[longest of a group] / E[length]."""
    return lengths.ordered_mean(group_size, group_size) / lengths.mean


def sigma_of_tail(tail: float, group_size: int) -> float:
    """The sigma of the lognormal whose tail multiplier is `tail` in groups of `group_size`.

    Raises:
        PlanError: no lognormal has it.
    """
    low, high = 0.0, MAX_SIGMA
    largest = tail_multiplier(Lognormal(uncut_mean=1.0, sigma=high), group_size)
    if not 1.0 <= tail <= largest:
        raise PlanError(
            "tail",
            f"{tail:g} cannot be: in groups of {group_size} the longest is 1 to {largest:.1f} times the mean; "
            "give E[longest of a group] / E[length], or --sigma",
        )
    for _ in range(60):
        middle = (low + high) / 2
        if tail_multiplier(Lognormal(uncut_mean=1.0, sigma=middle), group_size) < tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2
