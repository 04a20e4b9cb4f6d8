"""Sharded training for Lightning Thunder: block buckets without copies, ZeRO-2 and ZeRO-3, scheduled traces.

Import it before ``thunder`` on torch 2.13 and newer.
"""

from . import compat

compat.prepare()

from .api import fsdp  # noqa: E402
from .buckets import BucketSpec, ParamSpec, Plan  # noqa: E402
from .checkpoint import full_state_dict  # noqa: E402
from .schedule import CommOp, Schedule  # noqa: E402
from .transform import CompiledTraces, FSDPTransform  # noqa: E402
from .transforms import VerificationError  # noqa: E402

__all__ = [
    "BucketSpec",
    "CommOp",
    "CompiledTraces",
    "FSDPTransform",
    "ParamSpec",
    "Plan",
    "Schedule",
    "VerificationError",
    "fsdp",
    "full_state_dict",
]
