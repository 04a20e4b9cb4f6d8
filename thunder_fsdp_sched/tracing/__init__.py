"""Faster tracing of modules: calls without hooks as calls of ``forward``, and modules that are alike only once."""

from .module_calls import call_forward, trace_module_calls
from .repetition import Repetition

__all__ = ["Repetition", "call_forward", "trace_module_calls"]
