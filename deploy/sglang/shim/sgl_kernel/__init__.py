"""Inert stand-in for sgl_kernel on a CPU: every `*_cpu` name imports, and raises when called.

SGLang's CPU path imports these names at module level; a dense model without speculative decoding calls none of them.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+stub"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"the sgl_kernel stand-in has no {name}")

    return missing
