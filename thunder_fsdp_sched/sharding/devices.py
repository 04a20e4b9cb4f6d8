"""The device of shards, unsharded parameters and buffers."""

from __future__ import annotations

import torch

__all__ = ["resolve_device"]


def resolve_device(device: torch.device) -> torch.device:
    """Return ``device`` as the ``device`` of a tensor there: a GPU always has an index, a CPU never.

    A GPU without an index means the current one of this process. Thunder would read it as ``cuda:0`` on every rank,
    while inputs and parameters may be on ``cuda:1``.

    Raises:
        ValueError: there is no such GPU.
    """
    if device.type == "cuda":
        _check_gpu(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _check_gpu(device: torch.device) -> None:
    if not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.backends.cuda.is_built() else "this build of torch has no CUDA support"
        raise ValueError(f"device: {str(device)!r} is not available: {built}. Pass device='cpu', or leave device out")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"device: {str(device)!r} is not available: this process sees {torch.cuda.device_count()} GPUs. Pass "
            f"device='cuda' after torch.cuda.set_device(local_rank)"
        )
