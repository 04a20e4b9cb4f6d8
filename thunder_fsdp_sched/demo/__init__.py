"""The demo: train a small GPT unsharded, with Thunder's fsdp and with this package, and compare the runs."""

from .launch import run_demo
from .options import DemoOptions

__all__ = ["DemoOptions", "run_demo"]
