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
from .ir.schedule import CommOp, Schedule, StepSchedule
from .ir.step_memory import StepMemory
from .pipeline import CompiledTraces
from .plan.plan import Plan
from .plan.specs import BucketSpec, ParamSpec
from .plugin import FSDPSched
from .proof import VerificationError
from .ranks.channel import ScheduleDisagreement
from .transform import FSDPTransform
from .transforms.replay_schedule import ScheduleMismatch

if TYPE_CHECKING:
    from .checkpoint import (
        CheckpointError,
        full_state_dict,
        get_model_state_dict,
        get_optimizer_state_dict,
        latest_checkpoint,
        load_checkpoint,
        load_safetensors,
        save_checkpoint,
        save_safetensors,
    )
    from .training.eager import eager
    from .training.gradients import clip_grad_norm_, discard_unreduced, set_gradient_divide_factor
    from .training.unsharded import unsharded
    from .training.weight_stream import stream_full_parameters
    from .training.whole_parameters import WholeParameters

__all__ = [
    "BucketSpec",
    "CheckpointError",
    "CommOp",
    "CompiledTraces",
    "FSDPSched",
    "FSDPTransform",
    "ParamSpec",
    "Plan",
    "Schedule",
    "ScheduleDisagreement",
    "ScheduleMismatch",
    "StepMemory",
    "StepSchedule",
    "VerificationError",
    "WholeParameters",
    "clip_grad_norm_",
    "discard_unreduced",
    "eager",
    "fsdp",
    "full_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_safetensors",
    "set_gradient_divide_factor",
    "stream_full_parameters",
    "unsharded",
]

_LOADED_WHEN_USED = {
    "checkpoint": (
        *(
            "CheckpointError",
            "full_state_dict",
            "get_model_state_dict",
            "get_optimizer_state_dict",
            "latest_checkpoint",
        ),
        *("load_checkpoint", "load_safetensors", "save_checkpoint", "save_safetensors"),
    ),
    "training.eager": ("eager",),
    "training.gradients": ("clip_grad_norm_", "discard_unreduced", "set_gradient_divide_factor"),
    "training.unsharded": ("unsharded",),
    "training.weight_stream": ("stream_full_parameters",),
    "training.whole_parameters": ("WholeParameters",),
}
"""Modules that a training step does not need, with the public names in them."""

_MODULE_OF = {name: module for module, names in _LOADED_WHEN_USED.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
