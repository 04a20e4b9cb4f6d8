"""A GPT whose blocks are recomputed in backward, by each of the means that PyTorch has for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thunder_fsdp_sched.demo.model import GPT, Block

import torch
from systems import Shape
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["RecomputingShape"]

aten = torch.ops.aten

_SAVED = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}
"""Operators whose results a selective checkpoint saves."""


class _CheckpointedBlock(Block):
    """A block that saves its input alone. The forward of the class is that which FSDP2's hooks surround."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class _SelectiveBlock(Block):
    """A block that saves its input, and the results of matrix multiplications and attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class RecomputingShape(Shape):
    """The shape of a GPT that recomputes in backward.

    Attributes:
        recompute: ``"none"``; ``"every block"`` and ``"every second block"`` with ``torch.utils.checkpoint``;
            ``"selective"``, which saves the results of matrix multiplications and attention in every block; or the
            budget of ``torch.compile``, the share of a block's activations that is saved, as a string: ``"0.5"``.
    """

    recompute: str = "none"

    def model(self) -> GPT:
        model = super().model()
        compiled = _compiler(float(self.recompute)) if self.recompute[0].isdigit() else None
        for number, block in enumerate(model.blocks):
            if self.recompute == "every block" or (self.recompute == "every second block" and number % 2 == 0):
                block.__class__ = _CheckpointedBlock
            elif self.recompute == "selective":
                block.__class__ = _SelectiveBlock
            elif compiled is not None:
                block.forward = compiled(block.forward)
        return model


def _compiler(budget: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``torch.compile`` as it divides a function into forward and backward, without its compiler of kernels.

    Inductor allocates without operators, so its memory on a CPU could not be counted as that of others is.

    Args:
        budget: the share of the activations that forward saves.
    """
    import torch._dynamo
    import torch._functorch.config as config
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    torch._dynamo.config.recompile_limit = 64  # blocks of several models, each compiled on its own
    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        runs = torch.compile(function, backend=backend, dynamic=False)

        def run(*args: Any) -> Any:
            with config.patch(activation_memory_budget=budget):  # read when a block is compiled
                return runs(*args)

        return run

    return compiled
