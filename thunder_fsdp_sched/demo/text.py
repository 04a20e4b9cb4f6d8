"""The demo's text: the Python sources of the running interpreter's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["read_text", "sample"]


def read_text(limit: int = 1 << 20) -> torch.Tensor:
    """Return the first ``limit`` bytes of the standard library's modules, in the order of their file names.

    Raises:
        RuntimeError: this interpreter has no sources.
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 1 << 14:
        raise RuntimeError(f"no Python sources in {sysconfig.get_paths()['stdlib']}, the demo has no text to train on")
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def sample(text: torch.Tensor, *, step: int, seed: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of one step: ``batch`` sequences of ``length`` bytes, and for each byte the next one.

    It depends only on ``seed`` and ``step``, so every rank and every run draws the same batch.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    pieces = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
