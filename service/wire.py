"""The values that a client's JSON is made of: strict, bounded, each saying what it must be. Pure."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_UID = 2**32 - 2
"""The last one means "no user" to the kernel."""


class Wire(BaseModel):
    """A client's JSON: unknown fields are refused, values are never coerced from other types, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/") or "\x00" in path or path.endswith("/"):
        raise ValueError("must be an absolute path of a file or directory without '..' (for example /work/main.py)")
    return path


def _env_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be a name of letters, digits and underscores")
    return name


def _user(user: str) -> str:
    numbers = user.split(":")
    numeric = all(part.isascii() and part.isdigit() and int(part) <= MAX_UID for part in numbers) and len(numbers) <= 2
    if not numeric and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user):
        raise ValueError(f"must be a user's name in the image, or uid or uid:gid, each at most {MAX_UID}")
    return user


def _network(value: object) -> object:
    if value == "bridge":
        raise ValueError("must be 'none' or 'open': 'bridge' is called 'open' now")
    return value


def no_nul(text: str) -> str:
    """For texts that become part of a command line or of a key."""
    if "\x00" in text:
        raise ValueError("must not hold a NUL character")
    return text


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode without lone surrogates") from None
    return text


Text = Annotated[str, AfterValidator(_utf8)]
User = Annotated[str, Field(min_length=1, max_length=32, description="name, uid or uid:gid; null: the image's own"), AfterValidator(_user)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_utf8), AfterValidator(no_nul)]
AbsolutePath = Annotated[str, Field(max_length=4096), AfterValidator(_absolute), AfterValidator(_utf8)]
EnvName = Annotated[str, Field(max_length=200), AfterValidator(_env_name)]
EnvValue = Annotated[str, Field(max_length=131_071), AfterValidator(_utf8), AfterValidator(no_nul)]
Url = Annotated[str, Field(min_length=8, max_length=2000, pattern=r"^https?://[^\s/?#]+[^\s?#]*$")]
Network = Annotated[Literal["none", "open"], BeforeValidator(_network)]
