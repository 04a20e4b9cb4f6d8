"""Transforms of Thunder that cannot be combined with this one."""

from __future__ import annotations

from thunder.core.module import ThunderModule
from thunder.transforms.cudagraph import CUDAGraphTransform

__all__ = ["refuse_conflicts"]


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture.

    Raises:
        ValueError: names the transform.
    """
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise ValueError(
                f"transforms: {type(transform).__name__} would capture the collectives of fsdp(...) in CUDA graphs, which "
                f"replay the capture even after no_sync or an exception has changed what to do, so gradients would be "
                f"wrong. Remove it"
            )
