"""Faster compiling: calls without hooks are traced as calls of ``forward``, modules that are alike only once, and modes that
compute the same share a joint trace."""

from .garbage_collection import CollectsLess
from .module_calls import call_forward, trace_module_calls
from .repetition import Repetition
from .traced_computation import TracedComputation, defers_autograd, fingerprint, needs_backward, without_computation

__all__ = [
    "CollectsLess",
    "Repetition",
    "TracedComputation",
    "call_forward",
    "defers_autograd",
    "fingerprint",
    "needs_backward",
    "trace_module_calls",
    "without_computation",
]
