"""Several process groups: hybrid sharding, separate groups for some parameters, and a separate group for reductions."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Init, Ranks, ScheduleDisagreement, VerificationError, fsdp, full_state_dict, testing
from thunder_fsdp_sched.planning import compile_as_rank

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from internals import args_of, new_groups, verify
from models import Layer, Stack
from ranks import on_ranks
from scenario import Run, loss_of, sgd
from thunder.core.trace import from_trace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

#
# Hybrid sharding
#


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@on_ranks(4)
def test_hybrid_sharding_trains_like_the_unsharded_model(rank: int) -> None:
    torch.manual_seed(rank)  # all ranks take rank 3's parameters
    model = Stack(2).double()
    state = [model.state_dict()]
    dist.broadcast_object_list(state, src=3)
    run = Run(model, ranks=_mesh(), init=Init(broadcast_from=3))
    run.reference.load_state_dict(state[0])
    run.compare_parameters()
    run.train(2)
    run.micro_batch(5)
    run.micro_batch(6, no_sync=False)
    run.step()
    assert all(b.layout.world_size == 2 and b.replicas == 2 for b in run.transform.plan)

    schedule = run.transform.compiled[0].schedule.backward
    reductions = [op for op in schedule if op.kind in ("fsdp_reduce_scatter", "fsdp_all_reduce")]
    order = ["last", "blocks.1", "blocks.0", "first"]
    # An all-reduce across replicas follows the next bucket's reduce-scatter: its own could have finished by then.
    expected = [("fsdp_reduce_scatter", order[0])]
    for before, bucket in itertools.pairwise(order):
        expected += [("fsdp_reduce_scatter", bucket), ("fsdp_all_reduce", before)]
    assert [(op.kind, op.bucket) for op in reductions] == [*expected, ("fsdp_all_reduce", order[-1])]
    groups = {"fsdp_reduce_scatter": "mesh_shard", "fsdp_all_reduce": "mesh_replicate"}
    for op in reductions:
        assert op.group == groups[op.kind]
        assert op.nbytes * (2 if op.kind == "fsdp_all_reduce" else 1) == run.transform.plan[op.bucket].grad_bytes
    testing.assert_reductions_right_after_last_gradient(run.model)
    testing.assert_waits_right_before_first_consumer(run.model)
    testing.assert_same_schedule_on_all_ranks(run.model)


@on_ranks(4)
def test_replicas_reduce_in_the_dtype_of_the_policy(rank: int) -> None:
    mesh, policy = _mesh(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = thunder.jit(Stack(1), transforms=[transform := fsdp(ranks=mesh, mp_policy=policy)])
    (x,) = Stack(1).inputs(torch.Generator().manual_seed(rank))
    sharded(x.float()).sum().backward()
    dtypes = {op.kind: op.dtype for op in transform.compiled[-1].schedule.backward}
    assert dtypes["fsdp_all_gather"] == "bfloat16" and dtypes["fsdp_all_reduce"] == "float32"
    for param in sharded.parameters():
        grad = param.grad.to_local()
        dist.all_reduce(other := grad.clone(), op=dist.ReduceOp.MAX, group=mesh.get_group(0))
        assert torch.equal(grad, other), "replicas must have equal gradients"


#
# Separate groups for some parameters
#


class ExpertBlock(nn.Module):
    """A dense layer, and an expert that processes only the rows of the batch whose first element is positive."""

    def __init__(self, width: int, expert_width: int) -> None:
        super().__init__()
        self.dense = Layer(width)
        self.expert = nn.Sequential(nn.Linear(width, expert_width), nn.Tanh(), nn.Linear(expert_width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense.forward(x)
        return x + (x[:, :1] > 0).to(x.dtype) * self.expert.forward(x)


def _experts(rank: int) -> Any:
    """Return a model with experts that a rank shares with one other rank. The two pairs' experts differ in size."""
    model = Stack(2)
    model.blocks = nn.ModuleList(ExpertBlock(4, expert_width=5 if rank % 2 else 6) for _ in range(2))
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1 + rank % 2)]
    for name, param in model.named_parameters():
        nn.init.normal_(param, generator=generators[_is_expert(name)])
    return model.double()


def _is_expert(name: str) -> bool:
    return ".expert." in name


def _expert_group(rank: int) -> dist.ProcessGroup:
    groups = [dist.new_group([0, 2], group_desc="experts"), dist.new_group([1, 3], group_desc="experts")]
    return groups[rank % 2]


@on_ranks(4)
def test_experts_are_sharded_over_the_ranks_that_share_them(rank: int) -> None:
    expert_group, reference = _expert_group(rank), _experts(rank)
    transform = fsdp(
        sharding_strategy="zero2",
        ranks=Ranks(
            process_group_for=lambda name, param: expert_group if _is_expert(name) else None,
            separate_reduce_scatter_group=True,
        ),
    )
    sharded = thunder.jit(copy.deepcopy(reference), transforms=[transform])
    sizes = {b.name: b.layout.world_size for b in transform.plan}
    assert sizes["blocks.0"] == 4 and sizes["blocks.0.experts"] == 2
    optimizers = [sgd(list(model.parameters())) for model in (sharded, reference)]
    for step in range(3):
        inputs = reference.inputs(torch.Generator().manual_seed(10 * step + rank))
        for model in (sharded, reference):
            loss = loss_of(model(*inputs))
            if model is sharded and (step, rank) == (2, 1):  # all ranks gather again what this one has lost
                for bucket in transform.sharded.buckets:
                    bucket.private_slot.arena.contents.clear()
                    bucket.arena.release()
            loss.backward()
        for name, param in reference.named_parameters():
            group = expert_group if _is_expert(name) else None
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in full_state_dict(sharded).items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-11, atol=1e-11, msg=name)
    groups = {op.group for op in transform.compiled[-1].schedule.backward}
    assert groups == {"default_pg_reductions", "experts_reductions"}
    testing.assert_waits_right_before_first_consumer(sharded)
    testing.assert_gathers_in_consumer_order(sharded)


@on_ranks(timeout=60)
def test_ranks_that_have_created_different_numbers_of_groups_can_shard_together() -> None:
    for member in (0, 0, 1):
        dist.new_group([member])
    for steps in (1, 2):
        Run(Stack(1).double(), ranks=Ranks(separate_reduce_scatter_group=True)).train(steps)


@on_ranks()
def test_the_backend_is_recognized_however_the_process_group_was_created() -> None:
    for backend in ("undefined", "cpu:gloo"):  # init_process_group() without arguments sets the first
        group = dist.new_group(backend=backend)
        run = Run(Stack(1).double(), ranks=Ranks(process_group=group, separate_reduce_scatter_group=True))
        assert {bucket.comm.transport for bucket in run.transform.plan} == {"all_to_all"}, backend
        run.train(1)
        with pytest.raises(ValueError, check=coded("transport.refused-for-bucket", "gloo", "torch.float8_e4m3fn")):
            policy = MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)
            thunder.jit(Stack(1), transforms=[fsdp(ranks=group, mp_policy=policy)])
        dist.destroy_process_group(group)


#
# Errors
#

_UNSORTED = coded("ranks.mesh-ranks-not-ascending", "[2, 0]", "[0, 2]")


def _for_biases(_: Any) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [[2, 0], [1, 3]])
    return {"ranks": Ranks(process_group_for=lambda name, param: mesh if "bias" in name else None)}


REFUSED: dict[str, tuple[Callable[[dist.ProcessGroup], dict[str, Any]], type[Exception], coded]] = {
    "not a group": (
        lambda experts: {"ranks": Ranks(process_group_for=lambda name, param: 3 if name == "last.bias" else None)},
        TypeError,
        coded("ranks.parameter-group-of-wrong-type", "last.bias", "3"),
    ),
    "outside": (
        lambda experts: {"ranks": Ranks(process_group=experts, process_group_for=lambda name, param: dist.group.WORLD)},
        ValueError,
        coded("ranks.parameter-group-exceeds-world", "first.weight"),
    ),
    "bucket across groups": (
        lambda experts: {
            "ranks": Ranks(process_group_for=lambda name, param: experts if name == "first.bias" else None),
            "bucketing_strategy": lambda name, param: "everything",
        },
        ValueError,
        coded("option.bucket-over-two-groups", "first.weight", "first.bias", "everything"),
    ),
    "unsorted mesh": (lambda experts: {"ranks": DeviceMesh("cpu", [[2, 0], [1, 3]])}, ValueError, _UNSORTED),
    "unsorted mesh of one dimension": (
        lambda experts: {"ranks": DeviceMesh("cpu", [3, 2, 1, 0])},
        ValueError,
        coded("ranks.mesh-ranks-not-ascending", "[3, 2, 1, 0]"),
    ),
    "unsorted mesh of some parameters": (_for_biases, ValueError, _UNSORTED),
}


if "sort_ranks" in inspect.signature(dist.new_group).parameters:
    REFUSED["unsorted group"] = (
        lambda experts: {"ranks": dist.new_group([3, 2, 1, 0], sort_ranks=False)},
        ValueError,
        coded("ranks.unsorted-process-group", "[3, 2, 1, 0]"),
    )


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(4)
def test_invalid_groups_are_refused_by_jit(rank: int, case: str) -> None:
    make, error, expected = REFUSED[case]
    options = make(_expert_group(rank))
    with pytest.raises(error, check=expected):
        thunder.jit(Stack(1).double(), transforms=[fsdp(**options)])


@on_ranks(4)
def test_a_group_of_other_ranks_is_refused_on_every_rank(rank: int) -> None:
    others = dist.new_group([1, 2, 3])
    code = "ranks.ranks-disagree" if rank else "ranks.own-rank-outside-parameter-group"
    with pytest.raises(ScheduleDisagreement if rank else ValueError, check=coded(code, "rank 0", "'last.bias'")):
        thunder.jit(
            Stack(1).double(),
            transforms=[
                fsdp(ranks=Ranks(process_group_for=lambda name, param: others if name == "last.bias" else None))
            ],
        )


def _on_fake_mesh(make: Callable[[], Any], shape: tuple[int, int], rank: int = 0) -> Any:
    transform = compile_as_rank(
        make,
        lambda: fsdp(ranks=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))),
        rank=rank,
        world_size=shape[0] * shape[1],
    )
    return transform.compiled[-1]


def test_verify_refuses_a_reduction_that_skips_the_replicas():
    backward = _on_fake_mesh(lambda: (Stack(2), (torch.randn(3, 4),)), (4, 8), rank=13).backward
    trace = from_trace(backward)
    trace.bound_symbols = testing.statements(backward)
    verify(trace)
    replica_reduction = next(b for b in trace.bound_symbols if b.sym.name == "fsdp_all_reduce")
    reduce_scatter_future = replica_reduction.args[1]
    trace.bound_symbols = [
        b.from_bsym(args=(b.args[0], reduce_scatter_future)) if replica_reduction.output.name in args_of(b) else b
        for b in trace.bound_symbols
        if b is not replica_reduction
    ]
    with pytest.raises(
        VerificationError,
        check=coded("proof.invalid-bound-symbol", "fsdp_reduce_scatter of bucket 'last', but expects fsdp_all_reduce"),
    ):
        verify(trace)


#
# The end of a group, when its last reference is gone: with reference cycles, at any time, on each rank at another one
#


def _shard_in_a_cycle() -> list[Any]:
    """Shard a model over a new group, and return both in a reference cycle."""
    group = dist.new_group([0, 1])
    cycle = [
        group,
        thunder.jit(Stack(1), transforms=[fsdp(ranks=Ranks(process_group=group, separate_reduce_scatter_group=True))]),
    ]
    cycle.append(cycle)
    return cycle


@on_ranks(4)
def test_ranks_outside_of_a_mesh_need_not_take_part(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        Run(Stack(1).double(), ranks=mesh).train(2)


def test_models_that_are_given_one_ranks_object_have_a_control_each(one_rank: None) -> None:
    for ranks in (Ranks(process_group=dist.group.WORLD), Ranks(mesh=init_device_mesh("cpu", (1,)))):
        models = [thunder.jit(nn.Linear(2, 2), transforms=[fsdp(ranks=ranks)]) for _ in range(2)]
        one, other = (model._lc_transforms[-1].sharded.control for model in models)
        assert one is not other
        control = weakref.ref(one)
        del models, one, other
        gc.collect()
        assert control() is None  # no registry keeps it


def test_a_group_of_one_rank_has_no_twin(one_rank: None) -> None:
    transform = fsdp(ranks=Ranks(separate_reduce_scatter_group=True))
    thunder.jit(nn.Linear(2, 2), transforms=[transform])
    assert all(bucket.ranks.reductions is bucket.ranks.group for bucket in transform.sharded.buckets)


@on_ranks(2)
def test_a_group_that_is_collected_while_another_is_created_changes_no_name(rank: int) -> None:
    level = new_groups._level_group_counts

    def collect_after(*args: Any) -> Any:
        levels = level(*args)
        dropped.clear()
        if rank == 0:
            gc.collect()
        return levels

    dropped = [_shard_in_a_cycle()]
    dist.destroy_process_group(dropped[0][0])

    with mock.patch.object(new_groups, "_level_group_counts", collect_after):
        run = Run(
            Stack(1).double(), ranks=Ranks(process_group=dist.new_group([0, 1]), separate_reduce_scatter_group=True)
        )
    run.train(2)
