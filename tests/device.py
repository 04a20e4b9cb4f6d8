"""The device on which numerical tests run, chosen in the environment.

``TEST_DEVICE=cuda`` runs the tests marked ``device`` (tables of scenarios, the world, wire formats) on GPU 0, which
all ranks share through NCCL, and deselects the others. ``TEST_RANKS=1`` runs the scenarios that do not say otherwise on that
many ranks instead of two. ``TEST_KERNELS=1`` lets models on a GPU use torch's kernels, as models on a CPU do by default.
Without these, everything runs on the CPU, with gloo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
IS_CUDA = DEVICE.type == "cuda"
RANKS = int(os.environ.get("TEST_RANKS", "2"))
USES_KERNELS = not IS_CUDA or bool(os.environ.get("TEST_KERNELS"))
BACKEND = "cpu:gloo,cuda:nccl" if IS_CUDA else "gloo"
SHARED_MEMORY = "symmetric_memory" if IS_CUDA else "shared_files"
"""The transport through memory that ranks share: the real one, or its stand-in of the module ``shared_memory``."""


def use_device(rank: int) -> None:
    """Let this process use the device as a rank, before it creates a process group."""
    if IS_CUDA:
        sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
        from local_ranks import share_gpu

        share_gpu(rank)
        # Without a workspace of a fixed size, matrix products differ between runs.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
