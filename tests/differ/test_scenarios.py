"""Ranks that take other ways, or have no batch, have the gradients and parameters of the unsharded model.

The world (``tests/world.py``) mixes branches, orders, windows and missing batches with options. What it does not draw is
here: other transports, kinds of parameters and optimizers, what is merged, and limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy, Ranks, transform
from thunder_fsdp_sched.extras import symmetric_memory
from thunder_fsdp_sched.extras.ranks_differ import programs
from thunder_fsdp_sched.transports import Work
from thunder_fsdp_sched.transports.works import issue_then

import pytest
import shared_memory
import thunder
import torch
import torch.distributed as dist
from differing import Blocks, DifferingRun, Ways, adamw
from models import Layer
from ranks import on_ranks
from scenario import everywhere, loss_of, sgd
from torch import nn


@on_ranks()
def test_only_programs_that_differ_are_merged_and_each_trace_exchanges_one_round() -> None:
    run = DifferingRun(sharding_strategy="zero2")
    for step, ways in enumerate([("0", "1"), ("01", "10"), (None, "10")]):
        run.train(1, ways, first=step)
    assert all(run.merges)
    run.train(1, ("0", "0"), first=9)
    assert run.merges.count(False) == 1
    for step, ways in enumerate([("0", "1"), ("0", "0"), (None, "10"), ("0", "10")], start=10):
        with run.exchanges(2):  # a round at the start of each trace, also for the last combination, which is new
            run.micro_batch(step, ways, no_sync=False)
        run.step()


def _at_issue(issue: Callable[[], Sequence[Work]], action: Callable[[], None], uses: Sequence[torch.Tensor]) -> Work:
    """Run an action at once. As on a GPU, the order of collectives is that of their issues, not that of their waits."""
    action()
    return issue_then(issue, lambda: None, uses)


@on_ranks()
def test_memory_that_peers_read() -> None:
    shared_memory.register()
    with mock.patch.object(symmetric_memory, "issue_then", _at_issue):
        run = DifferingRun(transport="shared_files", ranks=Ranks(separate_reduce_scatter_group=True))
        run.train(1, ("0", "1"))
        run.micro_batch(1, ("0", "1"))
        run.micro_batch(2, ("0", None))
        run.micro_batch(3, (None, "1"), no_sync=False)
        run.step()
        assert all(run.merges)


@on_ranks(4)
def test_buckets_that_only_one_replica_uses() -> None:
    run = DifferingRun(ranks=(2, 2), accumulate="sharded")
    run.train(1, ("0", "0", "1", "1"))
    assert run.merges == [False]  # only backward communicates across replicas
    run.train(1, ("0", "", "", None), first=1)
    run.micro_batch(2, ("0", "0", "", ""))
    run.micro_batch(3, (None, None, "1", "1"), no_sync=False)
    run.step()
    run.micro_batch(4, ("0", "0", None, None))
    run.micro_batch(5, ("1", None, None, "0"))
    run.micro_batch(6, (None, "", None, ""), no_sync=False)
    run.step()
    assert True in run.merges


class Routed(Blocks):
    """A block that all ranks have, and an expert whose name and size depend on the half of the ranks."""

    def __init__(self, half: int) -> None:
        super().__init__(1)
        self.blocks.append(nn.ModuleDict({f"expert_{half}": Layer(4) if half else nn.Linear(4, 4)}))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        x = self.first(x)
        for number in way:
            for block in self.blocks[1].values() if number == "1" else [self.blocks[0]]:
                x = block(x)
        return self.last(x)


@on_ranks(4)
def test_experts_on_half_of_the_ranks(rank: int) -> None:
    half = rank // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][half]
    in_half = lambda name, param: group if "expert" in name else None  # noqa: E731
    run = DifferingRun(Routed(half).double(), ranks=Ranks(process_group_for=in_half), oracle=None)
    model, reference = run.model, Routed(half).double()
    reference.load_state_dict(run.initial)
    optimizer = adamw(reference.parameters())
    all_ways: list[tuple[Ways, bool]] = [
        (("1", "1", "1", "1"), False),  # other experts, but nothing to serve
        (("01", "1", "1", None), True),
        (("1", "1", "0", "0"), True),
        (("0", "", None, "1"), True),
        (("1", "1", "1", "1"), False),
    ]
    for step, (ways, merges) in enumerate(all_ways):
        run.at, known = f"step {step}", len(run.merges)
        x = run.inputs(step)
        if (way := ways[rank]) is None:
            tfs.without_batch(model).backward()
        else:
            loss_of(model(*x, way)).backward()
            loss_of(reference(*x, way)).backward()
        assert run.merges[known:] == [merges] * (step < 4), run.at
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            total = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            used = torch.tensor(theirs.grad is not None, dtype=torch.int32)
            for tensor in (total, used):
                dist.all_reduce(tensor, group=in_half(name, ours))
            theirs.grad = total / (2 if "expert" in name else 4) if used else None
            assert (ours.grad is None) == (theirs.grad is None), f"{run.at}: {name}"
            if ours.grad is not None:
                run.close(ours.grad.to_local(), run.rows(name, theirs.grad), name)
        for each in (*run.optimizers, optimizer):
            each.step()
            each.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        run.close(ours.to_local(), run.rows(name, theirs), name)


class Uneven(Blocks):
    """Blocks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Linear(4, 4)


@on_ranks()
def test_ranks_cast_blocks_in_opposite_order_to_memory_that_peers_read() -> None:
    shared_memory.register()
    with mock.patch.object(symmetric_memory, "issue_then", _at_issue):
        run = DifferingRun(Uneven(), casts=[0, 1], dtype=torch.float32, tolerance=0.03, transport="shared_files")
        run.train(1, ("01", "10"))
        run.train(1, ("01", None), first=1)


@pytest.mark.parametrize("casts", [(0,), (0, 1)], ids=["one rank", "all ranks"])
@on_ranks()
def test_what_another_forward_has_overwritten_in_lower_precision_is_gathered_again(casts: Sequence[int]) -> None:
    run = DifferingRun(Blocks(), casts=casts, dtype=torch.float32, tolerance=0.03, sharding_strategy="zero2")
    run.forward(0, ("0", "1"))
    run.forward(1, ("0", "1"))
    run.backward()
    run.backward()


@on_ranks()
def test_a_rank_that_serves_sends_its_rounding_errors(rank: int) -> None:
    policy = CommPolicy(reduce="int8", error_feedback=True)
    model = Blocks(2, partial(Layer, activation=torch.relu))
    run = DifferingRun(model, dtype=torch.float32, comm_policy=policy, tolerance=1e-6)
    bucket = next(b for b in run.transform.sharded.buckets if b.spec.name == "blocks.0")
    errors = []
    for step, ways in enumerate([("0", "0"), ("0", "0"), ("1", "0"), (None, "0")]):
        run.forward(step, ways)
        run.backward()
        errors.append(bucket.feedback.lost.abs().max())
    lost = bucket.spec.layout.unsharded_views(bucket.feedback.lost)
    for spec, error in zip(bucket.spec.params, lost, strict=True):  # nothing is lost but the last rounding errors
        dist.all_reduce(total := error.clone())
        grad = run.model.get_parameter(spec.name).grad.full_tensor()
        run.close(grad + total / 2, run.reference.get_parameter(spec.name).grad, spec.name)
    assert rank == 1 or errors[3] < errors[2] < errors[1] / 10


@on_ranks()
def test_optimizers_that_step_in_hooks() -> None:
    run = DifferingRun()
    for optimizer in [adamw([param]) for param in run.model.parameters()]:

        def step(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        optimizer.param_groups[0]["params"][0].register_post_accumulate_grad_hook(step)
    for number, ways in enumerate([("0", "1"), ("01", None), (None, ""), ("0", "0")]):
        run.micro_batch(number, ways, no_sync=False)
        assert all(param.grad is None for param in run.model.parameters())
        run.optimizers[1].step()
        run.optimizers[1].zero_grad()
        run.compare_parameters()


@on_ranks()
def test_programs_and_traces_that_ranks_have_forgotten() -> None:
    run = DifferingRun(optimizer=sgd)
    with mock.patch.object(programs, "MOST_PROGRAMS", 3), mock.patch.object(transform, "MAX_COMPILED", 3):
        for step, ways in enumerate([("0", "1"), ("01", None), ("1", "10"), ("", "01"), ("0", "1"), ("01", "0")]):
            run.train(1, ways, first=step)
            assert len(run.transform.compiled) <= 3
            registries = programs.differences_of(run.transform.sharded.control).registries
            assert max(len(registry.programs) for registry in registries.values()) <= 4
            known = {kind: (r.version, [*r.programs], [*r.outcomes]) for kind, r in registries.items()}
            assert all(theirs == known for theirs in everywhere(known))


@on_ranks()
def test_pinned_schedules(rank: int, tmp_path: Path) -> None:
    runs = [DifferingRun(prefetch=0)]
    for _ in range(2):
        runs[-1].train(1, ("0", "1"))
        runs[-1].train(1, (None, "1"), first=1)
        runs[0].transform.save_schedules(tmp_path / f"{rank}.json")
        runs.append(DifferingRun(schedule=tmp_path / f"{rank}.json"))
    assert runs[1].transform.schedules == runs[0].transform.schedules


@on_ranks()
def test_a_limit_that_merged_traces_exceed() -> None:
    run = DifferingRun(Blocks(3).double(), max_memory=6_000)
    run.train(1, ("", "1"))
    with pytest.raises((ValueError, RuntimeError), match="max_memory: 6,000 bytes"):  # or the error of another rank
        run.train(1, ("10", "2"), first=1)


@pytest.mark.usefixtures("one_rank")
def test_a_single_rank_without_a_batch_ends_a_window() -> None:
    module = nn.Linear(2, 2)
    model = thunder.jit(module, transforms=[tfs.fsdp(ranks_may_differ=True)])
    with model.no_sync():
        model(torch.ones(3, 2)).sum().backward()
        tfs.without_batch(model).backward()
    assert module.weight.grad is None
    tfs.without_batch(model).backward()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((2, 2), 3.0))
