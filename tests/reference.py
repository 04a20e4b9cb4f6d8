"""The sharded model and an unsharded copy, trained on the same batches and compared. New tests use ``scenario``.

A function that a test runs on several ranks creates ``Twins(rank, world_size, model, **options)`` and calls ``train()``.
Each step compares outputs, gradients and parameters. The expected gradients are the unsharded copies' means over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict

import thunder
import torch
import torch.distributed as dist
from scenario import loss_of, saved_for_backward

__all__ = ["Twins", "loss_of", "saved_for_backward"]


class Twins:
    """A model sharded by ``fsdp(**options)`` and its unsharded copy.

    Attributes:
        sharded: the jitted, sharded module.
        reference: the unsharded copy. It sees this rank's batches only; :meth:`mean_grads` averages over ranks.
        transform: the ``fsdp(...)`` in use.
        tolerance: for :func:`torch.testing.assert_close`. Thunder's decompositions round differently from eager torch,
            in float64 by about 1e-15, which three steps amplify a little. 0 requires equal bits.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        *,
        tolerance: float = 1e-11,
        jit_reference: bool = False,
        group: dist.ProcessGroup | None = None,
        before: Sequence[Any] = (),
        after: Sequence[Any] = (),
        jit_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.world_size, self.tolerance, self.group = rank, world_size, tolerance, group
        self.make_inputs = model.inputs
        self.reference = copy.deepcopy(model)
        if jit_reference:
            self.reference = thunder.jit(self.reference, transforms=[*before, *after], **(jit_options or {}))
        self.transform = fsdp(**options)
        self.sharded = thunder.jit(model, transforms=[*before, self.transform, *after], **(jit_options or {}))
        self.use(lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))

    def use(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Create an optimizer for the trainable parameters of each model."""
        self.optimizers = [
            optimizer([p for p in model.parameters() if p.requires_grad]) for model in (self.sharded, self.reference)
        ]

    def inputs(self, step: int = 0, **size: int) -> tuple[torch.Tensor, ...]:
        """Return this rank's batch for a step."""
        return self.make_inputs(torch.Generator().manual_seed(1000 * step + self.rank), **size)

    def forward(self, step: int = 0, **size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both models, compare their outputs, and return both losses."""
        inputs = self.inputs(step, **size)
        ours, theirs = self.sharded(*inputs), self.reference(*inputs)
        self.close(ours, theirs, "output")
        return loss_of(ours), loss_of(theirs)

    def backward(self, step: int = 0, **size: int) -> None:
        """Run forward and backward of both models. Does not compare gradients."""
        for loss in self.forward(step, **size):
            loss.backward()

    def update(self, *, set_to_none: bool = True) -> None:
        """Compare gradients, step both optimizers, zero gradients, and compare parameters."""
        for name, grad in self.check_grads().items():
            self.reference.get_parameter(name).grad = grad
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        self.check_parameters()

    def train(self, steps: int = 3, **size: int) -> None:
        for step in range(steps):
            self.backward(step, **size)
            self.update()

    def mean_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the reference's gradients, averaged over ranks."""
        grads = {
            name: None if param.grad is None else param.grad.clone()
            for name, param in self.reference.named_parameters(remove_duplicate=False)
        }
        every = [grad for grad in grads.values() if grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in every):  # one collective for all gradients of a dtype
            same = [grad for grad in every if grad.dtype is dtype]
            flat = torch.cat([grad.flatten() for grad in same])
            dist.all_reduce(flat, group=self.group)
            flat /= self.world_size
            for grad, mean in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
                grad.copy_(mean.view_as(grad))
        return grads

    def gathered_grads(self) -> dict[str, torch.Tensor | None]:
        """Return the sharded module's gradients, gathered."""
        grads = {}
        for name in self.transform.sharded.shards:
            grad = self.sharded.get_parameter(name).grad
            grads[name] = None if grad is None else grad.full_tensor()
        return grads

    def check_grads(self) -> dict[str, torch.Tensor | None]:
        """Compare this rank's rows of each gradient with those of the mean over ranks, and return the means."""
        means = self.mean_grads()
        for name in self.transform.sharded.shards:
            bucket, index = self.transform.sharded.locations[name]
            grad, mean = self.sharded.get_parameter(name).grad, means[name]
            assert (grad is None) == (mean is None), f"gradient of {name}: {grad}, expected {mean}"
            if grad is not None:
                self.close(grad.to_local(), bucket.local_rows(index, mean), f"gradient of {name}")
        return means

    def check_parameters(self) -> None:
        """Compare parameters and buffers."""
        ours, theirs = full_state_dict(self.sharded), self.reference.state_dict()
        for name in ours:
            self.close(ours[name], theirs[name], name)

    def close(self, ours: Any, theirs: Any, what: str) -> None:
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what} on rank {self.rank}: {text}",
        )

    def reduced(self, index: int = -1) -> list[str]:
        """Return the names of the buckets that a compiled backward reduces, in the order of reductions."""
        return [op.bucket for op in self.transform.compiled[index].backward_schedule.of("fsdp_reduce_scatter")]
