"""The demo: trains a small GPT unsharded, with Thunder's own fsdp and with this project's, and compares them."""

from .launch import run_demo
from .options import DemoOptions

__all__ = ["DemoOptions", "run_demo"]
