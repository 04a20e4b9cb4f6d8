"""Error feedback stands for gradients that were asked for, in units of the loss."""

from __future__ import annotations

import math

from thunder_fsdp_sched import CommPolicy, fsdp

import pytest
import thunder
import torch
from coded import coded
from models import Stack
from ranks import on_ranks
from scenario import loss_of
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from twins import AllKinds

POLICY = CommPolicy(reduce="int8", block=8, error_feedback=True)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@on_ranks(2)
def test_a_scaler_which_changes_the_unit_of_errors_is_refused(rank: int, kind: type[torch.amp.GradScaler]) -> None:
    model, scaler = thunder.jit(Stack(1), transforms=[fsdp(comm_policy=POLICY)]), kind("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(loss_of(model(torch.ones(3, 4)))).backward()
    with pytest.raises(RuntimeError, check=coded("encoding.error-feedback-with-grad-scaler")):
        scaler.step(optimizer)


@on_ranks(2)
def test_infinite_gradients_leave_finite_errors(rank: int) -> None:
    model = thunder.jit(Stack(1), transforms=[transform := fsdp(comm_policy=POLICY)])
    loss_of(model(torch.full((3, 4), math.inf if rank else 1.0))).backward()
    lost = [bucket.feedback.lost for bucket in transform.sharded.buckets if bucket.spec.reduce_wire]
    assert lost and all(errors.isfinite().all() for errors in lost)


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
