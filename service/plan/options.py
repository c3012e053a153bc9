"""What people say of a setting, of which some is measured, some given and some left out: the options of the command, as values.

A generator's speed is one of `tokens_per_s`, `latency_s` and `production`; a trainer's one of `train_s` and `consumption`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from service.plan.errors import PlanError
from service.plan.lengths import Floats, Lengths, Lognormal, Measured, sigma_of_tail
from service.plan.setting import Gate, QueueDrop, QueueMax, Rule, Setting

MAX_COMPARED = 64
"""Settings in one table: each is simulated, and a screen ends."""
DEFAULT_SIGMA = 0.5
DEFAULT_MEAN_TOKENS = 4096.0
DEFAULT_BUDGET = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """None: not said. production, consumption: samples per second; the rest as in `Setting`, `Gate` and `Lognormal`."""

    concurrency: int | None = None
    generators: int = 1
    generator_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    latency_s: float | None = None
    production: float | None = None
    train_s: float | None = None
    consumption: float | None = None
    update_s: float = 0.0
    group_size: int = 8
    groups_per_step: int = 32
    steps_per_version: int = 1
    extra_members: int = 0
    mean_tokens: float | None = None
    sigma: float | None = None
    tail: float | None = None
    max_tokens: float | None = None
    lengths: Floats | None = None
    sandbox_s: float = 0.0
    sandbox_sigma: float = 0.0
    tool_s: float = 0.0
    tool_sigma: float = 0.0
    verify_s: float = 0.0
    max_starting: int | None = None
    max_sandboxes: int | None = None
    sandbox_cpus: float = 1.0
    sandbox_memory_mib: int = 512
    acceptance: float = 1.0
    staleness_budget: int | None = None
    stale_policy: str = "requeue"
    max_requeues: int = 2
    queue: float | None = None
    queue_max: int | None = None

    def setting(self) -> Setting:
        """Raises PlanError for what is missing, said twice or impossible."""
        if self.concurrency is None:
            raise PlanError(
                "concurrency", "is missing: how many rollouts are in flight (a job's max_in_flight_rollouts)? or use --job or --preset"
            )
        lengths = self._lengths()
        consumption = self._consumption()
        alike = {field.name for field in fields(Setting)} & {field.name for field in fields(Options)} - {
            "lengths",
            "tokens_per_s",
            "train_s",
        }
        setting = Setting(
            lengths=lengths,
            tokens_per_s=1.0,
            train_s=self.groups_per_step * self.group_size / consumption if self.groups_per_step * self.group_size > 0 else 1.0,
            rule=self._rule(),
            **{name: getattr(self, name) for name in alike},
        )
        return replace(setting, tokens_per_s=self._tokens_per_s(setting))

    def settled(self) -> "Options":
        """The same setting, by what stays when other things change: a rollout's speed and the trainer's rate."""
        setting = self.setting()
        consumption = setting.batch / setting.train_s
        return replace(self, tokens_per_s=setting.tokens_per_s, latency_s=None, production=None, consumption=consumption, train_s=None)

    def overlaid(self, given: Mapping[str, Any]) -> "Options":
        """With `given` instead: what says the same in other words, or another rule, makes place."""
        changes = dict(given)
        for group in _SAME:
            if changes.keys() & group:
                changes = {name: None for name in group} | changes
        return replace(self, **changes)

    def changed(self, changes: Mapping[str, Any]) -> "Options":
        """Another setting beside this settled one. Other generators bring their rollouts with them."""
        if "generators" in changes and "concurrency" not in changes and self.concurrency is not None:
            changes = {**changes, "concurrency": round(self.concurrency * changes["generators"] / self.generators)}
        return self.overlaid(changes)

    def _lengths(self) -> Lengths:
        lognormal = {"mean-tokens": self.mean_tokens, "sigma": self.sigma, "tail": self.tail}
        if self.lengths is not None:
            if twice := [name for name, value in lognormal.items() if value is not None]:
                raise PlanError(twice[0], "says what the file of --lengths says already; leave one of them out")
            measured = Measured(self.lengths)
            return measured if self.max_tokens is None else measured.capped(self.max_tokens)
        if self.sigma is not None and self.tail is not None:
            raise PlanError("tail", "and --sigma say the same; leave one of them out")
        _positive("group-size", self.group_size)
        sigma = self.sigma if self.sigma is not None else DEFAULT_SIGMA if self.tail is None else sigma_of_tail(self.tail, self.group_size)
        mean = DEFAULT_MEAN_TOKENS if self.mean_tokens is None else self.mean_tokens
        return Lognormal(uncut_mean=mean, sigma=sigma, cap=math.inf if self.max_tokens is None else self.max_tokens)

    def _consumption(self) -> float:
        given = _one_of({"consumption": self.consumption, "train-s": self.train_s}, "how fast is the trainer?")
        _positive(given, self.consumption if self.train_s is None else self.train_s)
        if self.train_s is not None:
            return self.groups_per_step * self.group_size / self.train_s
        assert self.consumption is not None
        return self.consumption

    def _tokens_per_s(self, setting: Setting) -> float:
        choices = {"tokens-per-s": self.tokens_per_s, "latency-s": self.latency_s, "production": self.production}
        given = _one_of(choices, "how fast is a rollout?")
        _positive(given, choices[given])
        if self.tokens_per_s is not None:
            return self.tokens_per_s
        latency_s = self.latency_s if self.latency_s is not None else setting.slots / (self.production or 1.0)
        beside_s = setting.sandbox_s + setting.tool_s + setting.verify_s
        if latency_s <= beside_s:
            raise PlanError(
                given,
                f"leaves a rollout {latency_s:.3g} s, but sandbox, tools and verifier take {beside_s:.3g} s of it; correct one of them",
            )
        return setting.lengths.mean / (latency_s - beside_s)

    def _rule(self) -> Rule:
        said = [name for name in _RULES if getattr(self, name) is not None]
        if len(said) > 1:
            raise PlanError(said[1].replace("_", "-"), f"and --{said[0].replace('_', '-')} are different rules; leave one of them out")
        if self.queue is not None:
            return QueueDrop(batches=self.queue)
        if self.queue_max is not None:
            return QueueMax(max_staleness=self.queue_max)
        budget = DEFAULT_BUDGET if self.staleness_budget is None else self.staleness_budget
        return Gate(budget=budget, stale_policy=self.stale_policy, max_requeues=self.max_requeues)  # type: ignore[arg-type]


_RULES = ("staleness_budget", "queue", "queue_max")
_SAME = (
    {"tokens_per_s", "latency_s", "production"},
    {"train_s", "consumption"},
    {"sigma", "tail", "lengths"},
    {"mean_tokens", "lengths"},
    {*_RULES},
)
"""One of each says it."""


def variants(base: Options, compared: Sequence[str]) -> dict[str, Options]:
    """Every combination of what `compared` names, each as `name=value,value`; under a name for its row.

    Raises:
        PlanError: a name or value that is none, or too many combinations.
    """
    settled = base.settled()
    axes = [_axis(text) for text in compared]
    if math.prod(len(values) for _, values in axes) > MAX_COMPARED:
        raise PlanError("compare", f"makes more than {MAX_COMPARED} settings; name fewer values")
    found = {}
    for row in itertools.product(*(values for _, values in axes)):
        changes = dict(zip((name for name, _ in axes), row, strict=True))
        found[", ".join(f"{name}={_shown(value)}" for name, value in changes.items())] = settled.changed(changes)
    return found


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {field.name: _kind(str(field.type)) for field in fields(Options) if field.name != "lengths"}
    if not equals or name not in kinds:
        raise PlanError("compare", f"{text!r} is not name=value,value with a name of {', '.join(sorted(kinds))}")
    try:
        return name, [kinds[name](value.strip()) for value in values.split(",")]
    except ValueError:
        raise PlanError("compare", f"{text!r} has a value that is no {kinds[name].__name__}") from None


def _kind(annotation: str) -> type[int] | type[float] | type[str]:
    return next(kind for kind in (int, float, str) if kind.__name__ in annotation)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_of(choices: Mapping[str, float | None], question: str) -> str:
    given = [name for name, value in choices.items() if value is not None]
    if not given:
        raise PlanError(
            next(iter(choices)), f"is missing: {question} Give one of {', '.join('--' + name for name in choices)}, or --job or --preset"
        )
    if len(given) > 1:
        raise PlanError(given[1], f"and --{given[0]} say the same; leave one of them out")
    return given[0]


def _positive(option: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise PlanError(option, f"{value:g} is not a positive number")
