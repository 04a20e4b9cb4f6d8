"""The demo: train a small GPT unsharded, with Thunder's fsdp and with this package, and compare the runs."""

from .runs import DemoOptions
from .show import run_demo

__all__ = ["DemoOptions", "run_demo"]
