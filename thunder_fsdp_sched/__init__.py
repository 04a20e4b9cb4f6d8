"""Sharded training for Lightning Thunder: block buckets without copies, ZeRO-2 and ZeRO-3, scheduled traces.

Import it before ``thunder`` on torch 2.13 and newer.
"""

from . import compat

compat.prepare()
compat.import_thunder()

import importlib
from typing import TYPE_CHECKING, Any

from .api import fsdp
from .compat import __version__ as __version__
from .compiled_traces import CompiledTraces
from .ir.schedule import CommOp, Schedule, StepSchedule
from .option_groups import Debug, Init, Ranks, Sharding
from .plan.plan import Plan
from .plan.specs import BucketSpec, ParamSpec
from .proof import VerificationError
from .ranks.channel import ScheduleDisagreement
from .transform import FSDPTransform

if TYPE_CHECKING:
    from .extras.checkpoint import (
        CheckpointError,
        Saving,
        full_state_dict,
        get_model_state_dict,
        get_optimizer_state_dict,
        latest_checkpoint,
        load_checkpoint,
        load_safetensors,
        save_checkpoint,
        save_checkpoint_async,
        save_safetensors,
        save_safetensors_async,
    )
    from .extras.low_precision.policy import CommPolicy
    from .extras.ranks_differ.batches import batches, without_batch
    from .extras.replay import ScheduleMismatch
    from .extras.reports.exposed import exposed_communication
    from .extras.step_memory.step_memory import StepMemory
    from .extras.thunder_recipes import FSDPSched
    from .extras.training.eager import eager
    from .extras.training.gradients import clip_grad_norm_, discard_unreduced, set_gradient_divide_factor
    from .extras.training.unsharded import unsharded
    from .extras.training.weight_stream import stream_full_parameters
    from .extras.training.whole_parameters import WholeParameters

__all__ = [
    "BucketSpec",
    "CheckpointError",
    "CommOp",
    "CommPolicy",
    "CompiledTraces",
    "Debug",
    "FSDPSched",
    "FSDPTransform",
    "Init",
    "ParamSpec",
    "Plan",
    "Ranks",
    "Saving",
    "Schedule",
    "ScheduleDisagreement",
    "ScheduleMismatch",
    "Sharding",
    "StepMemory",
    "StepSchedule",
    "VerificationError",
    "WholeParameters",
    "batches",
    "clip_grad_norm_",
    "discard_unreduced",
    "eager",
    "exposed_communication",
    "fsdp",
    "full_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_checkpoint_async",
    "save_safetensors",
    "save_safetensors_async",
    "set_gradient_divide_factor",
    "stream_full_parameters",
    "unsharded",
    "without_batch",
]

_LOADED_WHEN_USED = (
    "extras.training.eager",
    "extras.training.gradients",
    "extras.training.unsharded",
    "extras.training.weight_stream",
    "extras.training.whole_parameters",
    "extras.checkpoint",
    "extras.low_precision.policy",
    "extras.thunder_recipes",
    "extras.step_memory.step_memory",
    "extras.replay",
    "extras.reports.exposed",
    "extras.ranks_differ.batches",
)
"""Modules that a training step does not need, in the order in which they are searched for a public name."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for path in _LOADED_WHEN_USED:
            module = importlib.import_module(f".{path}", __name__)
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
