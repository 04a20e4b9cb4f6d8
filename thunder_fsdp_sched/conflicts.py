"""Transforms of Thunder that cannot run beside this one."""

from __future__ import annotations

from thunder.core.module import ThunderModule
from thunder.transforms.cudagraph import CUDAGraphTransform

__all__ = ["refuse_conflicts"]


def refuse_conflicts(model: ThunderModule) -> None:
    """Refuse to compile together with CUDA graphs.

    A graph replays kernels. What the symbols of this package decide on the host (which gradients of ``no_sync`` are still to
    be reduced, whether a bucket is already resident, what the ranks have agreed on) would be decided once, while the graph
    is captured.

    Raises:
        ValueError: naming the transform.
    """
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise ValueError(
                f"transforms: {type(transform).__name__} would capture the collectives of fsdp(...) in CUDA graphs, which "
                f"replay what happened during the capture whatever no_sync or an exception has changed since: gradients "
                f"would be wrong. Leave it out"
            )
