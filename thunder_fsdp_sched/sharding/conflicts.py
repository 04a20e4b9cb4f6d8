"""Compilers and transforms that cannot be combined with this one."""

from __future__ import annotations

from thunder.core.module import ThunderModule
from thunder.transforms.cudagraph import CUDAGraphTransform

from ..private_api import runs_under_torch_compile

__all__ = ["refuse_conflicts"]


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs, or is called by what ``torch.compile`` compiles.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture. ``torch.compile`` would compile Thunder itself, and Thunder then fails somewhere.

    Raises:
        ValueError: names the transform.
        RuntimeError: ``torch.compile`` is at work.
    """
    if runs_under_torch_compile():
        raise RuntimeError(
            "the jitted module was called by a module or function that torch.compile compiles: leave torch.compile out, "
            "because Thunder compiles the module, or call the module in a function with torch.compiler.disable"
        )
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise ValueError(
                f"transforms: {type(transform).__name__} would capture the collectives of fsdp(...) in CUDA graphs, which "
                f"replay the capture even after no_sync or an exception has changed what to do, so gradients would be "
                f"wrong. Remove it"
            )
