"""Sharded training for Lightning Thunder: block buckets without copies, ZeRO-2 and ZeRO-3, scheduled traces.

Import it before ``thunder`` on torch 2.13 and newer.
"""

from . import compat

compat.prepare()

from .api import fsdp
from .buckets import BucketSpec, ParamSpec, Plan
from .checkpoint import full_state_dict
from .consistency import ScheduleDisagreement
from .plugin import FSDPSched
from .schedule import CommOp, Schedule, StepSchedule
from .transform import CompiledTraces, FSDPTransform
from .transforms import ScheduleMismatch, VerificationError

__all__ = [
    "BucketSpec",
    "CommOp",
    "CompiledTraces",
    "FSDPSched",
    "FSDPTransform",
    "ParamSpec",
    "Plan",
    "Schedule",
    "ScheduleDisagreement",
    "ScheduleMismatch",
    "StepSchedule",
    "VerificationError",
    "fsdp",
    "full_state_dict",
]
