"""`rollway demo`: the whole path on this machine, checked token by token."""

from service.demo.options import DemoOptions
from service.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
