"""Error feedback is in units of the loss, and of gradients that were asked for and applied."""

from __future__ import annotations

import math
from typing import Any

from thunder_fsdp_sched import CommPolicy, fsdp

import pytest
import thunder
import torch
from models import Stack
from ranks import on_ranks
from scenario import loss_of
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from twins import AllKinds

POLICY = CommPolicy(reduce="int8", block=8, error_feedback=True)


def _step(model: Any, scaler: Any, step: int, rank: int, then: float | None) -> list[torch.Tensor]:
    """Run a step that changes no parameter, and return this rank's rows of the unscaled gradients.

    Args:
        then: the new scale; ``None`` to let the gradients of this step overflow.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + rank))
    if then is None and rank == 1:
        x[0, 0] = math.inf
    scaler.scale(loss_of(model(x))).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update(then)
    model.zero_grad()
    return grads


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@on_ranks(2)
def test_error_feedback_follows_the_scale_of_the_loss_and_starts_afresh_after_a_skipped_step(
    rank: int, kind: type[torch.amp.GradScaler]
) -> None:
    def make(scale: float) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return thunder.jit(Stack(1), transforms=[fsdp(comm_policy=POLICY)]), kind("cpu", init_scale=scale)

    model, scaler = make(65536.0)
    constant, one = make(1.0)
    without = []  # gradients without feedback
    for step, scale in ((1, 1.0), (0, 8.0), (1, 0.5), (2, 4.0)):
        grads = _step(model, scaler, step, rank, scale)
        assert all(map(torch.equal, grads, _step(constant, one, step, rank, 1.0))), (step, scale)
        without = without or grads
        assert step != 1 or scale == 1.0 or not all(map(torch.equal, grads, without))
    _step(model, scaler, 3, rank, None)
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, _step(model, scaler, 1, rank, 2.0), without))


@on_ranks(2)
def test_gradients_that_were_not_asked_for_leave_error_feedback_as_it_is(rank: int) -> None:
    torch.manual_seed(0)
    rule = lambda name, param: "all"  # noqa: E731
    model = thunder.jit(
        AllKinds().double(), transforms=[transform := fsdp(comm_policy=POLICY, bucketing_strategy=rule)]
    )
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64, requires_grad=True)
    loss_of(model(x)).backward()
    buckets = [b for b in transform.sharded.buckets if b.spec.reduce_wire and b.spec.requires_grad]

    def changed() -> set[str]:
        """Return the names of the parameters whose feedback has changed since the previous call."""
        nonlocal before
        after = {
            spec.name: view.clone()
            for b in buckets
            for spec, view in zip(b.spec.params, b.spec.layout.unsharded_views(b.feedback.lost), strict=True)
        }
        names = {name for name, value in after.items() if not torch.equal(before.get(name, value), value)}
        before = after
        return names

    before: dict[str, torch.Tensor] = {}
    assert not changed()
    for _ in range(2):
        assert torch.autograd.grad(loss_of(model(x)), x)[0].any()
        assert not changed()
    weight, other = model.blocks[0].up.weight, model.head.weight
    loss_of(model(x)).backward(inputs=[weight])
    assert changed() == {"blocks.0.up.weight"}
    torch.autograd.grad(loss_of(model(x)), [other])
    assert changed() == {"embedding.weight"}  # tied
    loss_of(model(x)).backward()
    assert len(changed()) > 4
