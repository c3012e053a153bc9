"""Inert stand-in for torchvision (text-only serving): importing works, using anything raises.

SGLang imports torchvision at module level for its multimodal models; PyPI's build of it breaks beside a CPU torch.
"""

import sys
import types
from enum import StrEnum

__version__ = "0.28.0"

_SUBMODULES = (
    "io",
    "ops",
    "transforms",
    "transforms.v2",
    "transforms.functional",
    "transforms.v2.functional",
    "transforms.transforms",
    "models",
    "utils",
    "tv_tensors",
)


class InterpolationMode(StrEnum):
    """The names that transformers reads at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Missing:
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError("torchvision is a stand-in in this environment")


class _Inert(types.ModuleType):
    """A module in which every public name is a class that cannot be made."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type[_Missing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Missing,), {})


def _install(dotted: str) -> None:
    module = _Inert(f"{__name__}.{dotted}")
    sys.modules[module.__name__] = module
    parent, _, leaf = module.__name__.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
    if dotted.startswith("transforms"):
        module.__dict__["InterpolationMode"] = InterpolationMode


for _dotted in _SUBMODULES:
    _install(_dotted)
