"""Settings, read from the environment once, at the roofs (`rollway`, `python -m workers`, the Modal app), and passed down."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX = "ROLLWAY_"

OF_SCRIPTS = ("API_KEY", "CALL", "DEBIAN_MIRROR", "DOCKER_GID", "GENERATOR_PORT", "IMAGE", "MODEL", "NEED_DOCKER", "PORT", "REDIS_IMAGE")
"""Variables with our prefix that the scripts in deploy/ and .ci/ read, and what commands in sandboxes are marked with."""

FAMILIES_OF_SCRIPTS = ("DEMO_", "SGLANG_", "TEST_")


class Settings(BaseSettings):
    """One name each, prefix `ROLLWAY_`; lists are separated by commas."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    redis_url: SecretStr | None = Field(
        default=None, description="Redis or Valkey, or a node of a Redis Cluster; empty: an embedded Valkey in the data directory"
    )
    data_dir: Path = Field(default=Path(".rollway"), description="embedded Valkey, made tokenizers")
    deployment_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="label of our sandboxes; empty: one that the store keeps"
    )
    allow_lossy_redis: bool = Field(default=False, description="start on a Redis that evicts or does not persist (logged)")

    api_keys: Annotated[dict[str, SecretStr], NoDecode] = Field(default_factory=dict, description="tenant:key,tenant2:key2")
    operator_key: SecretStr | None = Field(default=None, description="for /metrics and operator calls")
    tokenizer_roots: Annotated[list[Path], NoDecode] = Field(default_factory=list, description="directories tokenizers may lie in")
    tokenizers: Annotated[list[str], NoDecode] = Field(default_factory=list, description="hub ids jobs may name")
    allowed_urls: Annotated[list[str], NoDecode] = Field(default_factory=list, description="URL prefixes on private addresses")
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024, description="one request body")
    max_event_streams: int = Field(default=4096, ge=1, description="open event streams of one gateway")
    retain_s: float = Field(default=3600.0, gt=0, description="how long tombstones and idempotency keys stay")
    grace_s: float = Field(default=20.0, gt=0, description="time to finish and hand back after SIGTERM")

    worker_rollouts: int = Field(default=64, ge=1, le=10_000, description="rollouts in flight in one worker")
    steer_s: float = Field(default=5.0, gt=0, le=60, description="how often the cap on rollouts in flight of an adaptive job is looked at")
    lease_s: float = Field(default=30.0, gt=1, description="a rollout's lease; renewed (and cancellations noticed) at a sixth of it")
    max_attempts: int = Field(default=3, ge=1, description="attempts of one rollout before it or its group fails")
    generate_timeout_s: float = Field(default=1800.0, gt=0, description="one generation call")
    worker_metrics_port: int | None = Field(default=None, ge=1, le=65535, description="Prometheus of a worker, on loopback")
    verify_concurrency: int = Field(default=16, ge=1, description="verifications at once in one worker")

    docker_host: str | None = Field(default=None, description="engine of the docker backend; empty: the local socket")
    process_backend: bool = Field(default=False, description="allow the process backend (development only: weaker isolation)")
    allow_network: bool = Field(default=False, description="jobs may ask for sandboxes with network 'open': whatever the machine reaches")
    sandbox_pool: int = Field(default=4, ge=0, le=1000, description="warm sandboxes per worker and backend; 0: none")
    max_starting: int = Field(default=4, ge=1, description="sandboxes starting at once in one worker")
    sandbox_starts_per_s: float = Field(default=50.0, gt=0, description="rate of sandbox starts in one worker")
    sandbox_start_s: float = Field(default=120.0, gt=0, description="start budget of one sandbox in wall time")
    sweep_s: float = Field(default=30.0, gt=0, description="sweep interval")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        keys = {}
        for pair in filter(None, (part.strip() for part in value.split(","))):
            tenant, _, key = pair.partition(":")
            if not tenant or len(key) < 8:
                raise ValueError("must be tenant:key pairs separated by commas, each key at least 8 characters")
            if tenant in keys:
                raise ValueError(f"names tenant {tenant!r} twice")
            keys[tenant] = key
        return keys

    @field_validator("tokenizer_roots", "tokenizers", "allowed_urls", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def unknown_settings(environ: Iterable[str]) -> list[str]:
    """A message for each variable with our prefix that nothing reads: most likely a slip of the pen."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    messages = []
    for name in sorted(environ):
        rest = name.upper().removeprefix(PREFIX)
        if not name.upper().startswith(PREFIX) or name.upper() in known or rest in OF_SCRIPTS or rest.startswith(FAMILIES_OF_SCRIPTS):
            continue
        close = difflib.get_close_matches(name.upper(), known, n=1)
        cure = f"did you mean {close[0]}?" if close else "`rollway config show` lists them"
        messages.append(f"{name} is no setting; {cure}")
    return messages


def is_secret(name: str) -> bool:
    """Whether the setting `name` must never be shown."""
    field = Settings.model_fields.get(name)
    return field is None or "SecretStr" in repr(field.annotation)
