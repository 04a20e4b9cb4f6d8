"""A model that is sent encoded, and what it must equal: one that is sent exactly and has the decoded values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import BucketSpec, CommPolicy

import thunder
import torch
from device import DEVICE
from saving import Everything
from scenario import everywhere, loss_of
from torch import nn


class AllKinds(Everything):
    """Parameters that are uneven, 1-D, 0-dim, empty, frozen and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.blocks[0].down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat((x, self.empty)))


def decoded(spec: BucketSpec, exact: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each name of a bucket's parameters with the value that gathers decode."""
    layout, wire = spec.layout, spec.gather_wire
    whole = [exact[param.name].to(DEVICE, copy=True) for param in spec.params]
    for rank in range(layout.world_size) if wire is not None else ():
        shard = torch.zeros(layout.shard_numel, dtype=spec.dtype, device=DEVICE)
        rows = layout.shard_views(rank, shard)
        owned = [_rows(value, placement, rank) for value, placement in zip(whole, layout.placements, strict=True)]
        for view, value in zip(rows, owned, strict=True):
            view.copy_(value)
        segments = [segment[None] for segment in layout.shard_segments(shard)]
        sent = torch.empty(1, wire.nbytes, dtype=torch.uint8, device=DEVICE)
        wire.encode(segments, sent)
        wire.decode(sent, segments)
        for view, value in zip(rows, owned, strict=True):
            value.copy_(view)
    for param, value in zip(spec.params, whole, strict=True):
        for name in param.names:
            yield name, value


def _rows(value: torch.Tensor, placement: Any, rank: int) -> torch.Tensor:
    rows = value if value.ndim else value[None]
    return rows[placement.row_starts[rank] : placement.row_starts[rank + 1]]


class Twins:
    """A model that is sent encoded, and its twin, which is sent exactly and has the decoded values.

    Args:
        options: of ``fsdp`` for both.

    Attributes:
        models: the two jitted models.
        own: the unsharded module with the decoded values.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        policy: CommPolicy,
        dtype: torch.dtype | None = torch.float64,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        module = (make().to(dtype) if dtype else make()).to(DEVICE)
        self.own, self.dtype, modules = copy.deepcopy(module), dtype, (module, copy.deepcopy(module))
        self.transform, other = tfs.fsdp(comm_policy=policy, **options), tfs.fsdp(**options)
        pairs = zip(modules, (self.transform, other), strict=True)
        self.models = [thunder.jit(module, transforms=[transform]) for module, transform in pairs]
        self.buckets = self.transform.sharded.buckets
        self.decode()

    def decode(self) -> None:
        """Give the twin the values that the model decodes."""
        state = tfs.full_state_dict(self.models[0])
        for bucket in self.buckets:
            state.update(decoded(bucket.spec, state))
        self.models[1].load_original_state_dict(state)
        self.own.load_state_dict(state)

    def inputs(self, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        made = [x.to(DEVICE) for x in self.own.inputs(torch.Generator().manual_seed(100 * step + rank))]
        return tuple(x.to(self.dtype) if self.dtype and x.is_floating_point() else x for x in made)

    def backward(self, step: int, rank: int, *, no_sync: bool = False) -> None:
        """Run forward and backward of both, whose losses must have the same bits."""
        losses = []
        for model in self.models:
            with model.no_sync() if no_sync else nullcontext():
                losses.append(loss_of(model(*self.inputs(step, rank)).double()))
                losses[-1].backward()
        assert torch.equal(*losses), f"losses {losses}"

    def compare_gradients(self, tolerance: float = 0.0) -> None:
        ours, theirs = ({n: p.grad for n, p in model.named_parameters()} for model in self.models)
        for name, grad in ours.items():
            assert (grad is None) == (theirs[name] is None), name
            if grad is not None:
                values = grad.full_tensor(), theirs[name].full_tensor()
                torch.testing.assert_close(
                    *values, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
                )

    def step(self, rate: float = 0.1) -> None:
        for model in self.models:
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param.sub_(rate * param.grad)
                    param.grad = None
        self.decode()

    def check_reductions(self, step: int, rank: int) -> float:
        """Check that gradients differ from exact means by at most what their format allows; return the largest share."""
        loss_of(self.own(*self.inputs(step, rank))).backward()
        own = {name: p.grad for name, p in self.own.named_parameters(remove_duplicate=False)}
        of_ranks, share = everywhere(own), 0.0
        ours = dict(self.models[0].named_parameters())
        self.own.zero_grad()
        # The unsharded module rounds differently from compiled ones.
        slack = 1e-5 if any(bucket.spec.dtype is torch.float32 for bucket in self.buckets) else 1e-10
        for bucket in self.buckets:
            spec = bucket.spec
            flat = torch.zeros(len(of_ranks), spec.layout.unsharded_numel, dtype=torch.float64, device=DEVICE)
            for number, of_rank in enumerate(of_ranks):
                for param, view in zip(spec.params, spec.layout.unsharded_views(flat[number]), strict=True):
                    if of_rank[param.name] is not None:
                        view.copy_(of_rank[param.name])
            bounds = torch.stack([_bounds(spec, of_rank) for of_rank in flat]).mean(0)
            views = (spec.layout.unsharded_views(values) for values in (flat.mean(0), bounds))
            for param, mean, bound in zip(spec.params, *views, strict=True):
                grad = ours[param.name].grad if param.requires_grad else None
                if grad is None or not grad.numel():
                    continue
                error = (grad.full_tensor().double().to(DEVICE) - mean).abs()
                assert (error <= bound + slack * (1 + mean.abs())).all(), (
                    f"{param.name}: {(error - bound).max()} too much"
                )
                if bound.any():
                    share = max(share, float((error / bound.clamp(min=1e-9)).max()))
        return share


def _bounds(spec: BucketSpec, flat: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each element of one rank's gradients as the documentation of formats tells it."""
    bounds = torch.zeros_like(flat)
    wire = spec.reduce_wire
    if wire is None:
        return bounds
    pairs = zip(spec.layout.unsharded_segments(flat), spec.layout.unsharded_segments(bounds), strict=True)
    for (x, bound), part in zip(pairs, wire.parts, strict=True):
        x, bound = (t.view(spec.layout.world_size, -1) for t in (x, bound))
        form = part.form
        for begin in range(0, part.numel, part.block):
            block = x[:, begin : begin + part.block].abs()
            scale = block.amax(-1, keepdim=True) / (form.largest or 1)
            if form.dtype is torch.int8:
                found = (scale / 2).expand_as(block)
            else:
                found = block * (2.0**-8 if form.dtype is torch.bfloat16 else 0.0)
            bound[:, begin : begin + part.block] = found * (1 + 2.0**-20)
    return bounds
