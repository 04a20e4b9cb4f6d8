"""Proofs that a trace does what its plan says: before it runs, by an abstract machine, and in its first run, by an audit.

Nothing here imports the analysis of traces or a pass, so no error in them can hide itself. What operators do is taken from
their effects, which for operators of others rest on ``ir.operator_facts``; the audit checks those.
"""

from .machine import VerificationError
from .verify import verify

__all__ = ["VerificationError", "verify"]
