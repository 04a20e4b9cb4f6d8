"""The options of the demo."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DemoOptions"]

_TOLERANCES = {torch.float32: (2e-5, 2e-4), torch.float64: (1e-12, 1e-9)}


@dataclass(frozen=True)
class DemoOptions:
    """Options of one demo.

    Attributes:
        steps: AdamW steps of each run; the first compiles, the last is counted and not timed.
        blocks, width: size of the model.
        length: bytes of one sequence.
        batch: sequences per rank and step.
        world_size: number of ranks, which are processes on this machine.
        strategies: which of ``"zero2"`` and ``"zero3"`` to run.
        prefetch: as in :func:`thunder_fsdp_sched.fsdp`.
        learning_rate: learning rate of AdamW.
        tolerance: overrides both of :attr:`loss_tolerance` and :attr:`parameter_tolerance`.
    """

    steps: int = 5
    blocks: int = 8
    width: int = 320
    length: int = 64
    batch: int = 4
    world_size: int = 2
    strategies: tuple[str, ...] = ("zero2", "zero3")
    prefetch: int = 1
    learning_rate: float = 1e-3
    seed: int = 0
    dtype: torch.dtype = torch.float32
    tolerance: float | None = None

    @property
    def heads(self) -> int:
        """The number of attention heads: the largest divisor of the width up to 8."""
        return next(h for h in range(8, 0, -1) if self.width % h == 0)

    @property
    def loss_tolerance(self) -> float:
        """The largest accepted difference from the unsharded run, in nats per byte."""
        return _TOLERANCES[self.dtype][0] if self.tolerance is None else self.tolerance

    @property
    def parameter_tolerance(self) -> float:
        """The largest accepted difference of a parameter element; in float32 a fifth of a step at the default rate.

        AdamW divides a gradient by its own size, so an element whose gradient is almost zero moves by a part of the
        learning rate that depends on the last bits.
        """
        return _TOLERANCES[self.dtype][1] if self.tolerance is None else self.tolerance
