"""Methods of FSDP2's modules on a jitted module: errors that name what to use instead."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from thunder.core.module import ThunderModule
from torch.distributed.fsdp import FSDPModule

__all__ = ["refuse_fsdp2_methods"]

_INSTEAD = {
    "reshard": "leave the context that unshards: tfs.unsharded(model, ...) or tfs.eager(model)",
    "set_gradient_divide_factor": "call tfs.set_gradient_divide_factor(model, factor)",
    "set_modules_to_backward_prefetch": "pass fsdp(prefetch=...)",
    "set_modules_to_forward_prefetch": "pass fsdp(prefetch=...)",
    "set_requires_gradient_sync": "run the micro-batches that are not the last inside of `with model.no_sync():`",
    "set_reshard_after_forward": "pass fsdp(sharding_strategy='zero2' or 'zero3'), or a function of (module name, module)",
    "unshard": "use `with tfs.unsharded(model, ...)` to change parameters, or `with tfs.eager(model)` to call modules",
}


def refuse_fsdp2_methods(model: ThunderModule) -> None:
    """Make each public method of ``FSDPModule`` that the module does not have itself an error of ``model``."""
    for name in vars(FSDPModule):
        if not name.startswith("_") and not hasattr(model, name):
            setattr(model, name, partial(_refuse, name))


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    instead = _INSTEAD.get(name, "see the table of methods under 'From FSDP2' in the documentation")
    raise NotImplementedError(
        f"{name} is a method of FSDP2, and this module is sharded by thunder_fsdp_sched: {instead}"
    )
