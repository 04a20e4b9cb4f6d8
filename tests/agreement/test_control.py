"""If ranks run different things, every rank raises ``ScheduleDisagreement`` with both sides before anything is issued."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement, compilation, fsdp, full_state_dict
from thunder_fsdp_sched.ir.inspection import AGREEMENT, statements
from thunder_fsdp_sched.ranks import channel
from thunder_fsdp_sched.transforms import insert_agreement

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

SECONDS = 60.0
"""How many seconds a rank waits for the others. Far more than any of them needs."""


class TwoBranches(nn.Module):
    """A module that uses one of two buckets, of equal or different sizes."""

    def __init__(self, right: int = 4) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, right)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        if x.shape[0] == 3:
            left = not left
        return self.drop((self.left if left else self.right)(x)).sum()


def _group() -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=SECONDS))


def _jit(module: nn.Module, **options: Any) -> Any:
    return thunder.jit(module, transforms=[fsdp(process_group=_group(), **options)])


def _disagree(rank: int, per_rank: list[Callable[[], Any]], *expected: str) -> None:
    """Run another function on each rank and check that every rank's error describes all of them."""
    with pytest.raises(ScheduleDisagreement) as caught:
        per_rank[rank]()
    message = str(caught.value)
    for text in expected:
        assert re.search(text, message), f"{text!r} is not in {message}"


def _run_different_variants(rank: int, world_size: int, tmp_path: Path) -> None:
    """Compile all variants on all ranks, and then run different ones. No rank compiles any more."""
    model = _jit(TwoBranches())
    two, three = torch.ones(2, 4), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor = two, left: bool = True) -> None:
        torch.manual_seed(0)
        model(x, left).backward()

    def no_sync() -> None:
        with model.no_sync():
            step()

    def evaluate() -> None:
        model.eval()
        try:
            with torch.no_grad():
                model(two, True)
        finally:
            model.train()

    def in_eval_mode() -> None:
        model.eval()
        try:
            model(two, True)
        finally:
            model.train()

    def run_eagerly() -> None:
        with tfs.eager(model) as eager_module:
            eager_module(two, True)

    def backward_only() -> None:
        loss.backward()

    variants = [step, lambda: step(left=False), lambda: step(three), no_sync, evaluate, in_eval_mode, run_eagerly]
    for variant in variants:
        variant()
    step()  # reduces the gradients of no_sync
    optimizer.zero_grad()
    step()
    before = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    step_text = (
        r"the forward for inputs float32\[2, 4\], True \(gradients enabled, training\) of module \d+ \(TwoBranches\)"
    )
    cases = [
        (lambda: step(left=False), r"rank 1: the forward for inputs float32\[2, 4\], False \(gradients enabled"),
        (lambda: step(three), r"rank 1: the forward for inputs float32\[3, 4\], True \(gradients enabled"),
        (in_eval_mode, r"rank 1: the forward for inputs float32\[2, 4\], True \(gradients enabled, evaluating\)"),
        (run_eagerly, r"rank 1: gathering inside eager\(\.\.\.\) left of module"),
        (lambda: full_state_dict(model), r"rank 1: gathering of left\.weight of module"),
        (lambda: tfs.save_checkpoint(tmp_path / "never", model), r"rank 1: save_checkpoint of module"),
        (lambda: tfs.clip_grad_norm_(model, 1.0), r"rank 1: clip_grad_norm_ with norm_type=2\.0 of module"),
    ]
    for other, expected in cases:
        _disagree(rank, [step, other], f"rank 0: {step_text}", expected)
    # The forwards of the ranks differ, or only the backwards do.
    _disagree(
        rank, [step, no_sync], r"rank 0: the (for|back)ward for [^\n]*\n    rank 1: the (for|back)ward [^\n]*no_sync"
    )
    _disagree(
        rank, [step, lambda: (evaluate(), step())], "rank 0: the (for|back)ward", r"rank 1: .*(no gradients|forward)"
    )
    loss = model(two, True)
    _disagree(
        rank, [backward_only, lambda: model(two, True)], "rank 0: the backward for inputs", f"rank 1: {step_text}"
    )
    assert not (tmp_path / "never" / ".metadata").exists()
    # Nothing was issued, so the ranks can continue.
    optimizer.zero_grad()
    step()
    assert all(torch.equal(param.grad, before[n]) for n, param in model.named_parameters() if param.grad is not None)


def test_ranks_that_run_different_traces_raise_and_can_continue(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_run_different_variants, tmp_path, timeout=400)


class LayerWithActivation(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x)).sum()


def _different_models(rank: int, world_size: int) -> None:
    x = torch.ones(2, 4)
    one, other = _jit(TwoBranches(right=6)), _jit(nn.Linear(4, 4))
    one(x, True).backward()
    _disagree(
        rank,
        [lambda: one(x, True), lambda: one(x, False)],
        "rank 0: the forward for inputs .*, True ",
        r"rank 1: compiling the forward of a trace of module \d+ \(TwoBranches\)",
    )
    one(x, False).backward()
    other(x).sum().backward()
    # Buckets of different sizes: gloo would abort the process if they met in a collective.
    other_text = r"the forward for inputs float32\[2, 4\] \(gradients enabled, training\) of module \d+ \(Linear\)"
    _disagree(rank, [lambda: one(x, True), lambda: one(x, False)], "rank 0: .*, True ", "rank 1: .*, False ")
    _disagree(rank, [lambda: one(x, True), lambda: other(x)], r"rank 0: .*\(TwoBranches\)", f"rank 1: {other_text}")
    one(x, True).backward()
    other(x).sum().backward()

    activated = _jit(LayerWithActivation(torch.relu if rank else torch.tanh))
    _disagree(
        rank,
        [lambda: activated(x)] * 2,
        "forward of a trace: the collectives agree but the computations differ",
        r"line \d+:\n    rank 0: tanh\(%\d+\) -> %\d+: float32\n    rank 1: gt",
    )
    allowed = _jit(LayerWithActivation(torch.relu if rank else torch.tanh), allow_different_computation=True)
    allowed(x).backward()
    allowed(x).backward()


def test_different_models_and_computations_raise_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(_different_models, timeout=400)


def _arrive_late(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=8))
    model = thunder.jit(nn.Linear(4, 4), transforms=[fsdp(process_group=group)])
    with tfs.eager(model) as module:
        module(torch.ones(2, 4))
    if rank == 1:
        dist.barrier()  # arrives, but too late
    with pytest.raises(ScheduleDisagreement) as caught, tfs.eager(model) as module:
        module(torch.ones(2, 4))
    if rank == 0:
        assert re.search(
            r"rank 1 did not come within \d+\.\d s:\n    rank 0: gathering inside eager", str(caught.value)
        )
        dist.barrier()
    else:
        assert re.search(r"disagree: the ranks did not come together|rank 0 did not come", str(caught.value))
    # The channel is closed for this model. The next model gets another one.
    with pytest.raises(ScheduleDisagreement, match=r"has come to .* since"), tfs.eager(model) as module:
        module(torch.ones(2, 4))
    model = thunder.jit(nn.Linear(4, 4), transforms=[fsdp()])
    with tfs.eager(model) as module:
        module(torch.ones(2, 4))


def test_the_error_names_a_late_rank_which_raises_when_it_arrives(ranks: Ranks) -> None:
    ranks.run(_arrive_late, timeout=120)


class ThreeLayers(nn.Module):
    """Three layers, each a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def _fail_at_gather(model: Any, position: int) -> None:
    """Run a forward that fails when it issues the gather of the bucket at ``position``."""
    buckets = model._lc_transforms[-1].sharded.buckets
    with mock.patch.object(buckets[position], "gather_into", side_effect=ArithmeticError("on demand")):
        with pytest.raises(ArithmeticError, match="on demand"):
            model(torch.ones(2, 4))


def _stop_at_different_gathers(rank: int, world_size: int) -> None:
    model = _jit(ThreeLayers(), bucketing_strategy="layer", prefetch=0)
    model(torch.ones(2, 4)).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    _fail_at_gather(model, 2)  # all ranks stop at the same gather
    model(torch.ones(2, 4)).backward()  # so they can continue
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), grads, strict=True))
    # The ranks stop at different gathers. Only the first was issued on both.
    with mock.patch.object(model._lc_transforms[-1].sharded.buckets[1].transport, "all_gather", return_value=[]):
        _fail_at_gather(model, 1 + rank)
    _disagree(
        rank,
        [lambda: model(torch.ones(2, 4))] * 2,
        r"rank 0: .*, after an exception or the like 2 collectives short",
        r"rank 1: .*, after an exception or the like 1 collectives short",
    )


def test_ranks_that_an_exception_stopped_at_different_collectives_raise(ranks: Ranks) -> None:
    ranks.run(_stop_at_different_gathers, timeout=200)


def _count_channels_and_keys(rank: int, world_size: int) -> None:
    group = _group()
    counts = []
    for _ in range(3):
        model = thunder.jit(TwoBranches(), transforms=[fsdp(process_group=group)])
        with tfs.eager(model) as module:
            module(torch.ones(2, 4), True)
        del model, module
        dist.barrier()
        counts.append((len(channel._channels), threading.active_count(), group.get_group_store().num_keys()))
        dist.barrier()
    assert counts[1] == counts[2], counts


def test_models_share_a_channel_and_do_not_accumulate_keys_in_the_store(ranks: Ranks) -> None:
    ranks.run(_count_channels_and_keys, timeout=120)


def _check_statement_order(rank: int, world_size: int) -> None:
    model = _jit(TwoBranches(), sharding_strategy="zero3")
    model(torch.ones(2, 4), True).backward()
    compiled = model._lc_transforms[-1].compiled[-1]
    for trace in (compiled.forward, compiled.backward):
        names = [b.sym.name for b in trace.bound_symbols]
        agree, agreed = names.index("fsdp_agree"), names.index("fsdp_agreed")
        first = next(i for i, name in enumerate(names) if name in ("fsdp_all_gather", "fsdp_reduce_scatter"))
        assert agree < agreed < first, names
        assert not any(b.sym.name in AGREEMENT for b in statements(trace))
    assert "fsdp_agree(forward_0)\n" in str(compiled.forward)
    # As with NCCL, where the round of agreement overlaps with the first gather.
    overlapping = partial(insert_agreement, before_issue=False)
    with mock.patch.object(
        compilation, "insert_agreement", lambda trace, run, before_issue: overlapping(trace, run=run)
    ):
        model = _jit(TwoBranches())
        for left in (True, False):
            model(torch.ones(2, 4), left).backward()
    for compiled in model._lc_transforms[-1].compiled:
        names = [b.sym.name for b in compiled.forward.bound_symbols if b.sym.name.startswith("fsdp_")]
        assert names[:4] == ["fsdp_agree", "fsdp_all_gather", "fsdp_agreed", "fsdp_wait_params"]
    _disagree(rank, [lambda: model(torch.ones(2, 4), rank == 0)] * 2, "rank 0: .*, True ", "rank 1: .*, False ")


def test_traces_agree_before_their_first_collective(ranks: Ranks) -> None:
    ranks.run(_check_statement_order, timeout=120)
