"""Several process groups: hybrid sharding, separate groups for some parameters, and a separate group for reductions."""

from __future__ import annotations

import itertools

from thunder_fsdp_sched import ScheduleDisagreement, fsdp, full_state_dict, testing
from thunder_fsdp_sched.ir.inspection import args_of
from thunder_fsdp_sched.ir.symbols import fsdp_all_reduce, fsdp_wait_grads
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank
from thunder_fsdp_sched.transforms import VerificationError, verify

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Layer, Model, Stack
from profiles import LONG_ONLY, mostly_zero3
from ranks import Ranks
from reference import Twins
from thunder.core.trace import TraceCtx, from_trace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

#
# Hybrid sharding
#


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _train_hybrid(rank: int, world_size: int, strategy: str) -> None:
    mesh = _mesh()
    torch.manual_seed(rank)  # all ranks take rank 3's parameters
    model = Stack(2).double()
    state = [model.state_dict()]
    dist.broadcast_object_list(state, src=3)
    twins = Twins(rank, world_size, model, sharding_strategy=strategy, mesh=mesh, broadcast_from=3)
    twins.reference.load_state_dict(state[0])
    twins.check_parameters()
    twins.train(steps=2)
    with twins.sharded.no_sync():
        twins.backward(step=5)
    twins.backward(step=6)
    twins.update()
    assert all(b.layout.world_size == 2 and b.replicas == 2 for b in twins.transform.plan)

    schedule = twins.transform.compiled[0].schedule.backward
    kinds = [(op.kind, op.bucket) for op in schedule if op.kind in ("fsdp_reduce_scatter", "fsdp_all_reduce")]
    order = ["last", "blocks.1", "blocks.0", "first"]
    # An all-reduce across replicas follows the next bucket's reduce-scatter: its own could have finished by then.
    expected = [("fsdp_reduce_scatter", order[0])]
    for before, bucket in itertools.pairwise(order):
        expected += [("fsdp_reduce_scatter", bucket), ("fsdp_all_reduce", before)]
    assert kinds == [*expected, ("fsdp_all_reduce", order[-1])]
    groups = {op.kind: op.group for op in schedule if op.kind in ("fsdp_reduce_scatter", "fsdp_all_reduce")}
    assert groups == {"fsdp_reduce_scatter": "mesh_shard", "fsdp_all_reduce": "mesh_replicate"}
    reductions = [op for op in schedule if op.kind == "fsdp_all_reduce"]
    assert all(op.nbytes * 2 == twins.transform.plan[op.bucket].grad_bytes for op in reductions)
    testing.assert_reductions_right_after_last_gradient(twins.sharded)
    testing.assert_waits_right_before_first_consumer(twins.sharded)
    testing.assert_same_schedule_on_all_ranks(twins.sharded)


@mostly_zero3
def test_hybrid_sharding_trains_like_the_unsharded_model(four_ranks: Ranks, strategy: str) -> None:
    four_ranks.run(_train_hybrid, strategy)


def _compare_hybrid_with_fsdp2(rank: int, world_size: int) -> None:
    """Compare with FSDP2 on the same mesh. Results differ by rounding, because Thunder decomposes gradients."""
    mesh = _mesh()
    models = [Stack(2).double(), Stack(2).double()]
    models[1].load_state_dict(models[0].state_dict())
    ours = thunder.jit(models[0], transforms=[fsdp(mesh=mesh)])
    for block in models[1].blocks:
        fully_shard(block, mesh=mesh)
    theirs = fully_shard(models[1], mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for step in range(3):
        (x,) = Stack(2).inputs(torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    unsharded = full_state_dict(ours)
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(unsharded[name], param.full_tensor(), rtol=1e-8, atol=1e-8)


def test_hybrid_sharding_trains_like_fsdp2_on_the_same_mesh(four_ranks: Ranks) -> None:
    four_ranks.run(_compare_hybrid_with_fsdp2)


def _hybrid_in_low_precision(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = thunder.jit(Stack(1), transforms=[transform := fsdp(mesh=_mesh(), mp_policy=policy)])
    (x,) = Stack(1).inputs(torch.Generator().manual_seed(rank))
    sharded(x.float()).sum().backward()
    dtypes = {op.kind: op.dtype for op in transform.compiled[-1].schedule.backward}
    assert dtypes["fsdp_all_gather"] == "bfloat16" and dtypes["fsdp_all_reduce"] == "float32"
    grads = [p.grad.to_local() for p in sharded.parameters()]
    others = [g.clone() for g in grads]
    replicas = _mesh().get_group(0)
    for grad in others:
        dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=replicas)
    assert all(torch.equal(g, o) for g, o in zip(grads, others, strict=True)), "replicas must have equal gradients"


def test_replicas_reduce_in_the_dtype_of_the_policy(four_ranks: Ranks) -> None:
    four_ranks.run(_hybrid_in_low_precision)


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


class Experts(Model):
    """A model with experts that a rank shares with one other rank. The two pairs' experts differ in size."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(ExpertBlock(4, expert_width=5 if rank % 2 else 6) for _ in range(2))
        self.last = nn.Linear(4, 3)
        generators = [torch.Generator().manual_seed(seed) for seed in (0, 1 + rank % 2)]
        for name, param in self.named_parameters():
            nn.init.normal_(param, generator=generators[_is_expert(name)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first.forward(x)
        for block in self.blocks:
            x = block(x)
        return self.last.forward(x)


def _is_expert(name: str) -> bool:
    return ".expert." in name


class ExpertTwins(Twins):
    """``Twins`` that average the gradients of experts over the ranks that share them."""

    expert_group: dist.ProcessGroup

    def mean_grads(self) -> dict[str, torch.Tensor | None]:
        grads = {}
        for name, param in self.reference.named_parameters():
            group = self.expert_group if _is_expert(name) else None
            grads[name] = grad = param.grad.clone()
            dist.all_reduce(grad, group=group)
            grad /= dist.get_world_size(group)
        return grads


def _expert_group(rank: int) -> dist.ProcessGroup:
    groups = [dist.new_group([0, 2], group_desc="experts"), dist.new_group([1, 3], group_desc="experts")]
    return groups[rank % 2]


def _train_experts(rank: int, world_size: int, strategy: str, separate: bool) -> None:
    expert_group = _expert_group(rank)
    twins = ExpertTwins(
        rank,
        world_size,
        Experts(rank).double(),
        sharding_strategy=strategy,
        process_group_for=lambda name, param: expert_group if _is_expert(name) else None,
        separate_reduce_scatter_group=separate,
    )
    twins.expert_group = expert_group
    sizes = {b.name: b.layout.world_size for b in twins.transform.plan}
    assert sizes["blocks.0"] == 4 and sizes["blocks.0.experts"] == 2
    twins.train(steps=3)
    groups = {op.group for op in twins.transform.compiled[-1].schedule.backward}
    expected = {"default_pg", "experts"} if strategy == "zero3" or not separate else set()
    assert groups == expected | ({"default_pg_reductions", "experts_reductions"} if separate else set())
    testing.assert_waits_right_before_first_consumer(twins.sharded)
    testing.assert_gathers_in_consumer_order(twins.sharded)


@pytest.mark.parametrize(
    ("strategy", "separate"),
    [
        ("zero2", True),
        ("zero3", False),
        pytest.param("zero2", False, marks=LONG_ONLY),
        pytest.param("zero3", True, marks=LONG_ONLY),
    ],
)
def test_experts_are_sharded_over_the_ranks_that_share_them(four_ranks: Ranks, strategy: str, separate: bool) -> None:
    four_ranks.run(_train_experts, strategy, separate)


def _train_with_separate_reductions(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(
        rank, world_size, Stack(2).double(), sharding_strategy=strategy, separate_reduce_scatter_group=True, prefetch=2
    )
    twins.train(steps=2)
    buckets = twins.transform.sharded.buckets
    assert len({id(b.ranks.reductions) for b in buckets}) == 1
    assert all(b.ranks.reductions.name != b.ranks.group.name for b in buckets)
    testing.assert_prefetch_distance(twins.sharded, 2)


@mostly_zero3
def test_reductions_may_have_a_separate_process_group(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_with_separate_reductions, strategy)


def _train_where_one_rank_knows_more_groups(rank: int, world_size: int) -> None:
    for member in (0, 0, 1):
        dist.new_group([member])
    for steps in (1, 2):
        twins = Twins(rank, world_size, Stack(1).double(), separate_reduce_scatter_group=True)
        twins.train(steps=steps)


def test_ranks_that_have_created_different_numbers_of_groups_can_shard_together(ranks: Ranks) -> None:
    ranks.run(_train_where_one_rank_knows_more_groups, timeout=60)


#
# Errors
#


def _expect_refusal(rank: int, world_size: int, case: str) -> None:
    expert_group = _expert_group(rank)
    outside = dist.new_group([0, 1]) if case != "group of others" else dist.new_group([1, 2, 3])
    options: dict[str, object] = {}
    expected: tuple[type[Exception], str]
    if case == "group of others":
        options = {"process_group_for": lambda name, param: outside if name == "last.bias" else None}
        refused = r"process_group_for: rank 0 is not in the process group for parameter 'last\.bias'"
        expected = (ScheduleDisagreement, rf"rank 0: ValueError: {refused}") if rank else (ValueError, refused)
    elif case == "not a group":
        options = {"process_group_for": lambda name, param: 3 if name == "last.bias" else None}
        expected = TypeError, r"process_group_for: expected a process group.*'last\.bias', got 3"
    elif case == "outside":
        options = {"process_group": expert_group, "process_group_for": lambda name, param: dist.group.WORLD}
        expected = ValueError, r"process_group_for: the group for parameter 'first\.weight' holds ranks \[\d, \d\]"
    elif case == "bucket across groups":
        options = {
            "process_group_for": lambda name, param: expert_group if name == "first.bias" else None,
            "bucketing_strategy": lambda name, param: "everything",
        }
        expected = (
            ValueError,
            r"puts 'first\.weight' and 'first\.bias' into one bucket 'everything', .* two process groups",
        )
    elif case == "no callable":
        options = {"process_group_for": expert_group}
        expected = TypeError, "process_group_for: expected a callable"
    elif case == "broadcast":
        options = {"mesh": _mesh(), "broadcast_from": 7}
        expected = ValueError, "broadcast_from: rank 7 is not in the process group"
    with pytest.raises(expected[0], match=expected[1]):
        thunder.jit(Stack(1).double(), transforms=[fsdp(**options)])


CASES = ["group of others", "not a group", "outside", "bucket across groups", "no callable", "broadcast"]


@pytest.mark.parametrize("case", CASES)
def test_invalid_groups_are_refused_by_jit(four_ranks: Ranks, case: str) -> None:
    four_ranks.run(_expect_refusal, case)


def _hybrid_backward() -> TraceCtx:
    step = compile_as_rank(
        lambda: (Stack(2), (torch.randn(3, 4),)),
        lambda: fsdp(mesh=init_device_mesh("cpu", (4, 8), mesh_dim_names=("replicate", "shard"))),
        rank=13,
        world_size=32,
    )
    trace = from_trace(step.compiled[-1].backward)
    trace.bound_symbols = testing.statements(step.compiled[-1].backward)
    return trace


def test_verify_refuses_a_reduction_that_skips_the_replicas():
    trace = _hybrid_backward()
    verify(trace)
    replica_reduction = next(b for b in trace.bound_symbols if b.sym is fsdp_all_reduce)
    reduce_scatter_future = replica_reduction.args[1]
    trace.bound_symbols = [
        b.from_bsym(args=(b.args[0], reduce_scatter_future)) if replica_reduction.output.name in args_of(b) else b
        for b in trace.bound_symbols
        if b is not replica_reduction
    ]
    with pytest.raises(
        VerificationError, match=f"bucket '{replica_reduction.args[0].spec.name}' is not reduced across its replicas"
    ):
        verify(trace)


def test_verify_refuses_an_all_reduce_that_is_never_waited_for():
    trace = _hybrid_backward()
    wait = next(b for b in trace.bound_symbols if b.sym is fsdp_wait_grads)
    trace.bound_symbols = [b for b in trace.bound_symbols if b is not wait]
    with pytest.raises(VerificationError):
        verify(trace)


class SmallNorm(nn.Module):
    """A model with a norm between large layers, whose communication and compute take almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head.forward(self.norm(x))


def test_an_all_reduce_is_not_issued_after_a_reduce_scatter_too_small_to_hide_its_input():
    step = compile_as_rank(
        lambda: (SmallNorm(), (torch.randn(3, 64),)),
        lambda: fsdp(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
        rank=0,
        world_size=4,
    )
    schedule = step.compiled[-1].schedule.backward
    kinds = [(op.kind.removeprefix("fsdp_"), op.bucket) for op in schedule if "reduce" in op.kind]
    assert kinds == [
        ("reduce_scatter", "head"),
        ("reduce_scatter", "norm"),
        ("all_reduce", "head"),  # frees the memory of one reduction for a third
        ("reduce_scatter", "blocks.1"),
        ("all_reduce", "norm"),
        ("reduce_scatter", "blocks.0"),
        ("all_reduce", "blocks.1"),
        ("all_reduce", "blocks.0"),
    ]


def _train_with_backends(rank: int, world_size: int) -> None:
    for backend in ("undefined", "cpu:gloo"):  # init_process_group() without arguments sets the first
        group = dist.new_group(backend=backend)
        twins = Twins(rank, world_size, Stack(1).double(), process_group=group, separate_reduce_scatter_group=True)
        assert {bucket.comm.transport for bucket in twins.transform.plan} == {"all_to_all"}, backend
        twins.train(steps=1)
        with pytest.raises(ValueError, match="gloo cannot send"):
            policy = MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)
            thunder.jit(Stack(1), transforms=[fsdp(process_group=group, mp_policy=policy)])
        dist.destroy_process_group(group)


def test_the_backend_is_recognized_however_the_process_group_was_created(ranks: Ranks) -> None:
    ranks.run(_train_with_backends)
