"""Proofs that a trace does what its plan says: before it runs, by an abstract machine, and in its first run, by an audit.

Nothing here imports the analysis of traces or a pass, so no error in them can hide itself. The proof relies on the
effects of operators. Those of other packages' operators rest on ``ir.operator_facts``, which the audit checks.
"""

from .machine import VerificationError
from .verify import verify

__all__ = ["VerificationError", "verify"]
