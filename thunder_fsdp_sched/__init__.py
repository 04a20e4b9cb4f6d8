"""Sharded training for Lightning Thunder: block buckets without copies, ZeRO-2 and ZeRO-3, scheduled traces.

Import it before ``thunder`` on torch 2.13 and newer.
"""

import ast
import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compat
from .compat import __version__ as __version__

if TYPE_CHECKING:
    from .api import fsdp
    from .compiled_traces import CompiledTraces
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
    from .extras.training.overlap_step import overlap_step
    from .extras.training.unsharded import stream_full_parameters, unsharded
    from .extras.training.whole_parameters import WholeParameters
    from .ir.operator_facts import declare_operator
    from .ir.schedule import CommOp, Schedule, StepSchedule
    from .option_groups import Debug, Init, Ranks, Sharding
    from .plan.specs import BucketSpec, ParamSpec, Plan
    from .proof import VerificationError
    from .ranks.rounds import ScheduleDisagreement
    from .transform import FSDPTransform

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
    "declare_operator",
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
    "overlap_step",
    "save_checkpoint",
    "save_checkpoint_async",
    "save_safetensors",
    "save_safetensors_async",
    "set_gradient_divide_factor",
    "stream_full_parameters",
    "unsharded",
    "without_batch",
]

_MODULES = ("fabric", "huggingface", "planning", "reports", "testing", "transports")
"""Public modules, imported when they are used: ``tfs.testing`` needs no import of its own."""


@functools.cache
def _places() -> dict[str, str]:
    """Return the module of each public name: that from which type checkers import it above."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.name: f".{node.module}" for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in __all__:
        value = globals()[name] = getattr(importlib.import_module(_places()[name], __name__), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])


def _runs_as_command() -> bool:
    """Return whether this is ``python -m thunder_fsdp_sched``, whose ``--help`` needs neither torch nor Thunder.

    While Python looks for ``__main__``, the first element of ``sys.argv`` is "-m".
    """
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__


if not _runs_as_command():
    compat.start()
    importlib.import_module(".api", __name__)
