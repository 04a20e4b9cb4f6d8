"""Training on gloo ranks, compared with the unsharded model.

Each test runs a function named ``_...`` on every rank. Most use :class:`reference.Twins`, which compares outputs, gradients,
parameters and buffers with the unsharded model in every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict
from thunder_fsdp_sched.runtime.row_dtensor import local_rows

import pytest
import thunder
import torch
import torch.distributed as dist
from models import (
    CASES,
    GPT,
    Buffers,
    FrozenParameters,
    Layer,
    Model,
    Stack,
    TinyParameters,
    UnusedParameters,
)
from profiles import LONG_ONLY, mostly_zero3
from ranks import Ranks
from reference import Twins, loss_of, saved_for_backward
from thunder.core import prims
from thunder.core.trace import from_trace
from thunder.transforms.materialization import MaterializationTransform
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

each_strategy = pytest.mark.parametrize("strategy", ["zero2", "zero3"])
only_zero2, only_zero3 = (
    pytest.mark.parametrize("strategy", [s]) for s in ("zero2", "zero3")
)  # for tests to which the strategy matters little


#
# Kinds of parameters
#


def _train_case(rank: int, world_size: int, case: str, strategy: str) -> None:
    model = CASES[case]().double()
    twins = Twins(rank, world_size, model, tolerance=model.tolerance, sharding_strategy=strategy)
    with saved_for_backward() as saved:
        twins.train(steps=3)
    assert saved
    _check_nothing_saved_in_arena(twins, saved)


def _check_nothing_saved_in_arena(twins: Twins, saved: list[torch.Tensor]) -> None:
    shared = {b.arena for b in twins.transform.sharded.buckets}
    leaked = [tuple(t.shape) for t in saved if any(arena.span_of(t) for arena in shared)]
    assert not leaked, f"saved tensors of shapes {leaked} are in memory that other buckets overwrite"


# ZeRO-2 differs in what is kept for backward. It is tested with models that keep something other than each parameter once.
@pytest.mark.parametrize(
    ("case", "strategy"),
    [(case, "zero3") for case in CASES]
    + [
        pytest.param(case, "zero2", marks=[] if case in ("tied_weights", "buffers") else [LONG_ONLY])
        for case in ("tied_weights", "frozen_parameters", "shared_blocks", "derived_parameters", "buffers")
    ],
)
def test_trains_like_the_unsharded_model(ranks: Ranks, case: str, strategy: str) -> None:
    ranks.run(_train_case, case, strategy)


def _train_over_pairs_of_ranks(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = pairs[rank % 2]
    # Ranks 0 and 1 start with other parameters and take those of ranks 2 and 3.
    torch.manual_seed(rank)
    twins = Twins(rank, 2, TinyParameters().double(), group=pair, process_group=pair, broadcast_from=2 + rank % 2)
    for tensor in twins.reference.parameters():
        dist.broadcast(tensor.detach(), src=2 + rank % 2, group=pair)
    twins.train(steps=2)


def test_ranks_without_rows_of_some_parameters_train_correctly(four_ranks: Ranks) -> None:
    four_ranks.run(_train_case, "tiny_parameters", "zero3")


def test_two_groups_of_ranks_train_separate_models(four_ranks: Ranks) -> None:
    four_ranks.run(_train_over_pairs_of_ranks)


def _train_with_frozen_buckets(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, FrozenParameters().double(), sharding_strategy=strategy)
    twins.train(steps=2)
    frozen = {b.name for b in twins.transform.plan if not b.requires_grad}
    assert "blocks.1" in frozen and len(frozen) == 4, frozen
    assert sorted(twins.reduced()) == sorted(b.name for b in twins.transform.plan if b.requires_grad)
    gathered = [op.bucket for op in twins.transform.compiled[-1].forward_schedule.of("fsdp_all_gather")]
    assert sorted(gathered) == sorted(b.name for b in twins.transform.plan)
    for name, param in twins.sharded.named_parameters():
        assert param.requires_grad == twins.reference.get_parameter(name).requires_grad, name


@only_zero3
def test_frozen_buckets_are_gathered_but_not_reduced(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_with_frozen_buckets, strategy)


def _differentiate_through_a_frozen_model(rank: int, world_size: int, strategy: str) -> None:
    model = Stack(2).double().requires_grad_(False)
    reference = copy.deepcopy(model)
    sharded = thunder.jit(model, transforms=[transform := fsdp(sharding_strategy=strategy)])
    inputs = model.inputs(torch.Generator().manual_seed(rank))[0].requires_grad_()
    ours, theirs = (torch.autograd.grad(loss_of(m(inputs)), inputs)[0] for m in (sharded, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    backward = transform.compiled[-1].backward_schedule
    assert not backward.of("fsdp_reduce_scatter")
    assert len(backward.of("fsdp_all_gather")) == (len(transform.plan) if strategy == "zero3" else 0)


@each_strategy
def test_gradients_flow_through_a_fully_frozen_model(ranks: Ranks, strategy: str) -> None:
    ranks.run(_differentiate_through_a_frozen_model, strategy)


def _train_with_unused_blocks(rank: int, world_size: int) -> None:
    twins = Twins(rank, world_size, UnusedParameters().double())
    twins.train(steps=1)
    compiled = twins.transform.compiled[-1]
    for schedule in (compiled.forward_schedule, compiled.backward_schedule):
        assert {op.bucket for op in schedule} == {"blocks.0", "blocks.2"}


def test_unused_blocks_do_not_communicate(ranks: Ranks) -> None:
    ranks.run(_train_with_unused_blocks)


def _freeze_and_thaw(rank: int, world_size: int) -> None:
    twins = Twins(rank, world_size, Stack(2).double())
    twins.train(steps=1)
    for requires_grad in (False, True):
        for model in (twins.sharded, twins.reference):
            for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
                model.get_parameter(name).requires_grad_(requires_grad)
        twins.train(steps=1)


def test_parameters_can_be_frozen_after_the_first_steps(ranks: Ranks) -> None:
    ranks.run(_freeze_and_thaw)


#
# Bit-equal results
#


def _compare_gpt_with_one_process(rank: int, world_size: int, strategy: str) -> None:
    model = GPT(blocks=1, tied=True, block=Layer).double()
    twins = Twins(rank, world_size, model, sharding_strategy=strategy)
    twins.use(lambda params: torch.optim.AdamW(params, lr=1e-2))
    for step in range(3):
        batches = [twins.make_inputs(torch.Generator().manual_seed(10 * step + r)) for r in range(world_size)]
        loss = twins.sharded(*batches[rank])
        loss.backward()
        dist.all_reduce(loss.detach())
        reference_loss = twins.reference(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
        reference_loss.backward()
        torch.testing.assert_close(loss.detach() / world_size, reference_loss.detach(), rtol=1e-9, atol=1e-9)
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Adam divides by the root of the squared gradient, which amplifies rounding where gradients are nearly zero.
    twins.tolerance = 1e-8
    twins.check_parameters()


@only_zero3
def test_gpt_trains_like_one_process_with_the_batches_of_all_ranks(ranks: Ranks, strategy: str) -> None:
    ranks.run(_compare_gpt_with_one_process, strategy)


def _train_gpt_bit_for_bit(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, GPT(blocks=1), tolerance=0, jit_reference=True, sharding_strategy=strategy)
    twins.use(lambda params: torch.optim.AdamW(params, lr=1e-2))
    with saved_for_backward() as saved:
        twins.train(steps=3)
    _check_nothing_saved_in_arena(twins, saved)


@only_zero2
def test_gpt_is_bit_equal_to_the_unsharded_compiled_model_in_float32(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_gpt_bit_for_bit, strategy)


def _sweep_options(rank: int, world_size: int, strategy: str) -> None:
    model = Stack(2).double()
    sweep: list[dict[str, Any]] = [
        {},
        {"prefetch": 2, "bucketing_strategy": "none"},
        {"bucketing_strategy": lambda name, param: name[-4:]},
    ]
    if strategy == "zero3":
        sweep += [{"prefetch": 9, "bucketing_strategy": "layer"}, {"prefetch": 0, "bucketing_strategy": 300}]
    expected = None
    for options in sweep:
        twins = Twins(
            rank,
            world_size,
            copy.deepcopy(model),
            tolerance=0 if expected else 1e-11,
            sharding_strategy=strategy,
            **options,
        )
        if expected is None:  # only the first is compared with a reference; the others must equal the first bit for bit
            twins.train()
            expected = full_state_dict(twins.sharded)
            continue
        for step in range(3):
            loss_of(twins.sharded(*twins.inputs(step))).backward()
            twins.optimizers[0].step()
            twins.optimizers[0].zero_grad()
        for name, value in full_state_dict(twins.sharded).items():
            twins.close(value, expected[name], f"{name} with {options}")


@mostly_zero3
def test_every_prefetch_and_bucketing_gives_the_same_bits(ranks: Ranks, strategy: str) -> None:
    ranks.run(_sweep_options, strategy, timeout=400)


def _compare_with_fsdp2(rank: int, world_size: int, strategy: str) -> None:
    # ReLU, because Thunder decomposes the backward of tanh and GELU, which rounds differently from eager torch.
    model = Stack(2, width=8, activation=torch.relu)
    peer = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in peer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(peer, mesh=mesh)
    sharded = thunder.jit(model, transforms=[fsdp(mesh=mesh, sharding_strategy=strategy)])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, peer)]
    for step in range(3):
        (x,) = model.inputs(torch.Generator().manual_seed(10 * step + rank), batch=4)
        for m, optimizer in zip((sharded, peer), optimizers, strict=True):
            loss_of(m(x.float())).backward()
            optimizer.step()
            optimizer.zero_grad()
    theirs = {name: param.full_tensor() for name, param in peer.state_dict().items()}
    for name, param in full_state_dict(sharded).items():
        torch.testing.assert_close(param, theirs[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@each_strategy
def test_parameters_are_bit_equal_to_fsdp2_in_float32(ranks: Ranks, strategy: str) -> None:
    ranks.run(_compare_with_fsdp2, strategy)


#
# Kinds of calls
#


def _train_eval_train(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Buffers().double(), sharding_strategy=strategy)
    for model in (twins.sharded, twins.reference):
        model.eval()
    with torch.inference_mode():  # before unsharded memory has been allocated
        twins.forward()
    for model in (twins.sharded, twins.reference):
        model.train()
    twins.train(steps=1)
    for model in (twins.sharded, twins.reference):
        model.eval()
    with torch.no_grad():
        ours, _ = twins.forward(step=1)
        assert not ours.requires_grad
    (evaluation,) = [c for c in twins.transform.compiled if c.backward_schedule is None]
    assert len(evaluation.forward_schedule.of("fsdp_all_gather")) == len(twins.transform.plan)
    twins.train(steps=1)  # with gradients, in evaluation mode
    for model in (twins.sharded, twins.reference):
        model.train()
    twins.train(steps=2)
    with torch.no_grad():
        twins.forward(step=2)
    twins.train(steps=1)


@only_zero3
def test_evaluation_without_gradients_between_steps(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_eval_train, strategy)


def _train_with_several_shapes(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    for step, batch in enumerate((3, 7, 3, 7)):
        twins.train(steps=1, batch=batch)
        twins.backward(step, batch=batch)
        twins.update()
    assert len(twins.transform.compiled) == 2
    # An unfinished forward of each shape, and two of one, at the same time.
    losses = [twins.forward(step, batch=batch) for step, batch in enumerate((3, 7, 3))]
    for ours, theirs in losses[1:] + losses[:1]:
        ours.backward()
        theirs.backward()
    twins.update()


@each_strategy
def test_several_input_shapes_in_turn_and_at_the_same_time(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_with_several_shapes, strategy)


def _train_on_uneven_batches(rank: int, world_size: int) -> None:
    twins = Twins(rank, world_size, Stack(2).double())
    # Ranks compile at different times: one compiles while the other runs cached traces.
    for batch in ((3, 3), (3, 2), (5, 3), (5, 2)):
        twins.train(steps=1, batch=batch[rank])


def test_ranks_may_have_batches_of_different_shapes(ranks: Ranks) -> None:
    ranks.run(_train_on_uneven_batches)


def _train_two_models(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    pair = [Twins(rank, world_size, Stack(2).double()), Twins(rank, world_size, Stack(2).double())]
    for step in range(2):
        losses = [twins.forward(step) for twins in pair]
        for ours, theirs in losses:
            ours.backward()
            theirs.backward()
        for twins in pair:
            twins.update()
    assert pair[0].transform.plan == pair[1].transform.plan
    storages = [{t.to_local().untyped_storage().data_ptr() for t in twins.sharded.parameters()} for twins in pair]
    assert not storages[0] & storages[1]


def test_two_models_with_the_same_names_in_one_process(ranks: Ranks) -> None:
    ranks.run(_train_two_models)


def _differentiate_inputs(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    (x,) = twins.inputs()
    grads = []
    for model in (twins.sharded, twins.reference):
        leaf = x.clone().requires_grad_()
        loss_of(model(leaf)).backward()
        grads.append(leaf.grad)
    twins.close(*grads, "gradient of the input")
    twins.update()

    params = [p for p in twins.sharded.parameters()]
    (loss, expected_loss) = twins.forward()
    ours = torch.autograd.grad(loss, params)
    expected_loss.backward()
    for param, grad in zip(params, ours, strict=True):
        param.grad = grad
    twins.update()


@only_zero3
def test_gradients_of_inputs_and_by_torch_autograd_grad_are_correct(ranks: Ranks, strategy: str) -> None:
    ranks.run(_differentiate_inputs, strategy)


class _ReturnsParameters(Model):
    """A model that returns its output, a parameter, views of parameters, and a parameter that it does not use otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.only_returned = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {
            "output": x,
            "parameter": self.blocks[0].up.weight,
            "view": self.blocks[0].down.weight.t()[1:],
            "slice": self.blocks[1].up.weight[3],
            "unused": self.only_returned,
        }


def _train_model_that_returns_parameters(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, _ReturnsParameters().double(), sharding_strategy=strategy)
    returned = []
    for step in range(3):
        inputs = twins.inputs(step)
        ours, theirs = twins.sharded(*inputs), twins.reference(*inputs)
        twins.close(ours, theirs, "output")
        loss_of(ours).backward()
        loss_of(theirs).backward()
        returned.append((ours, {name: value.detach().clone() for name, value in theirs.items()}))
        twins.update()
    for ours, theirs in returned:  # unchanged by later steps
        twins.close(ours, theirs, "returned earlier")


@each_strategy
def test_returned_parameters_keep_their_values(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_model_that_returns_parameters, strategy)


#
# Several forwards before backward, and exceptions
#


def _several_graphs(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    for first, second in ((0, 1), (1, 0)):
        losses = [twins.forward(step) for step in (0, 1)]
        for number in (first, second):
            for loss in losses[number]:
                loss.backward()
        twins.update()
    for a, b in zip(twins.forward(2), twins.forward(3), strict=True):
        (a + 2 * b).backward()
    twins.update()


@each_strategy
def test_two_forwards_before_their_backwards(ranks: Ranks, strategy: str) -> None:
    ranks.run(_several_graphs, strategy)


def _retain_graph(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    losses = twins.forward()
    twins.forward(1)  # its gathers overwrite those of the first forward
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    twins.update()
    for loss in losses:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    twins.train(steps=1)


@each_strategy
def test_a_second_backward_needs_retain_graph(ranks: Ranks, strategy: str) -> None:
    ranks.run(_retain_graph, strategy)


def _change_under_a_live_graph(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    twins.train(steps=1)
    schedule = twins.transform.compiled[-1].backward_schedule
    gathered_again = {op.bucket for op in schedule.of("fsdp_all_gather")}
    assert strategy == "zero2" or gathered_again == {"blocks.0", "blocks.1", "last"}
    for bucket in twins.transform.plan:
        for name in (param.name for param in bucket.params):
            loss, expected_loss = twins.forward()
            # Backward does not read the first bucket's parameters, so under ZeRO-3 it may continue with correct gradients.
            harmless = strategy == "zero3" and bucket.name not in gathered_again
            if harmless:
                expected_loss.backward()
            with torch.no_grad():
                twins.sharded.get_parameter(name).mul_(1.5)
                twins.reference.get_parameter(name).mul_(1.5)
            if harmless:
                loss.backward()
                twins.update()
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                assert all(p.grad is None for p in twins.sharded.parameters())
    twins.train(steps=2)


@each_strategy
def test_a_parameter_changed_between_forward_and_backward_is_an_error(ranks: Ranks, strategy: str) -> None:
    ranks.run(_change_under_a_live_graph, strategy)


def _change_between_steps(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)

    def scale(param: nn.Parameter) -> None:
        with torch.no_grad():
            param.mul_(0.5)

    def edit_data(param: nn.Parameter) -> None:
        param.data.add_(0.25)

    def clamp_data(param: nn.Parameter) -> None:
        param.data[:] = param.data.clamp(-0.3, 0.3)

    for change in (scale, edit_data, clamp_data):
        twins.train(steps=1)
        for param in (*twins.sharded.parameters(), *twins.reference.parameters()):
            change(param)
    twins.train(steps=1)


@only_zero2
def test_parameters_changed_in_place_between_steps_are_used(ranks: Ranks, strategy: str) -> None:
    ranks.run(_change_between_steps, strategy)


class _Lookup(Model):
    """A model whose second block fails at run time if an index is out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(4), nn.Embedding(5, 4), Layer(4), Layer(4)])

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x) + self.blocks[1](index)
        return self.blocks[3](self.blocks[2](x))

    def inputs(self, generator: torch.Generator, batch: int = 3) -> tuple[torch.Tensor, ...]:
        return (*super().inputs(generator, batch), torch.randint(5, (batch,), generator=generator))


def _fail_in_forward(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, _Lookup().double(), sharding_strategy=strategy, prefetch=2)
    out_of_range = torch.tensor([0, 7, 1])

    def in_flight() -> list[Any]:
        buckets = twins.transform.sharded.buckets
        arenas = {b.arena for b in buckets} | {b.private_slot.arena for b in buckets if b.private_slot}
        return [flight for arena in arenas for flight in arena.in_flight]

    for attempt in range(3):  # the first attempt compiles
        with pytest.raises(IndexError):
            twins.sharded(twins.inputs()[0], out_of_range)
        assert in_flight(), "forward must fail between a gather and its wait"
        twins.train(steps=1)
        assert not in_flight(), "collectives left in flight must be waited for before their memory is reused"
        twins.forward(attempt)  # a forward without backward
    twins.train(steps=1)


@only_zero3
def test_training_continues_after_an_exception_in_the_middle_of_forward(ranks: Ranks, strategy: str) -> None:
    ranks.run(_fail_in_forward, strategy)


def _fail_in_backward(rank: int, world_size: int, strategy: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in backward")

    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    for _ in range(2):
        (x,) = twins.inputs()
        with pytest.raises(ArithmeticError, match="in backward"):  # after the sharded model's backward
            twins.sharded(Fails.apply(x.requires_grad_())).sum().backward()
        with pytest.raises(ArithmeticError, match="in backward"):  # before it
            Fails.apply(twins.sharded(x.detach())).sum().backward()
        for param in twins.sharded.parameters():
            param.grad = None
        twins.train(steps=1)


@only_zero3
def test_training_continues_after_an_exception_in_backward(ranks: Ranks, strategy: str) -> None:
    ranks.run(_fail_in_backward, strategy)


#
# Gradients and optimizers
#


def _accumulate(rank: int, world_size: int, strategy: str) -> None:
    twins = Twins(rank, world_size, Stack(2).double(), sharding_strategy=strategy)
    params = list(twins.sharded.parameters())
    for accumulation in range(2):
        with twins.sharded.no_sync():
            for micro_batch in range(2):
                twins.backward(10 * accumulation + micro_batch)
                assert all(p.grad is None for p in params), "unreduced gradients must not be in .grad"
        twins.backward(10 * accumulation + 2)
        twins.update()

    # no_sync between backwards that reduce: gradients that are already in `.grad` stay there and count.
    twins.backward(3)
    before = [p.grad.clone() for p in params]
    with twins.sharded.no_sync():
        twins.backward(4)
    twins.close([p.grad for p in params], before, "gradients after no_sync")
    twins.backward(5)
    twins.update()

    assert {c.no_sync for c in twins.transform.compiled} == {False, True}
    for compiled in twins.transform.compiled:
        reductions = len(compiled.backward_schedule.of("fsdp_reduce_scatter"))
        assert reductions == (0 if compiled.no_sync else len(twins.transform.plan))
        accumulations = len(compiled.backward_schedule.of("fsdp_accumulate_grads"))
        assert accumulations == (len(twins.transform.plan) if compiled.no_sync else 0)


@each_strategy
def test_no_sync_accumulates_gradients_without_reducing(ranks: Ranks, strategy: str) -> None:
    ranks.run(_accumulate, strategy)


class _OptionalBlock(Model):
    """A model in which only some calls use the second block and one parameter of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[0].extra = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x * self.blocks[0].extra) if extra else x


def _accumulate_in_some_blocks(rank: int, world_size: int) -> None:
    twins = Twins(rank, world_size, _OptionalBlock().double())
    for order in ((True, False), (False, True), (True, False)):
        with twins.sharded.no_sync():
            for model in (twins.sharded, twins.reference):
                loss_of(model(*twins.inputs(0), order[0])).backward()
        for model in (twins.sharded, twins.reference):
            loss_of(model(*twins.inputs(1), order[1])).backward()
        twins.update()


def test_unreduced_gradients_of_a_block_that_the_last_micro_batch_skips_are_reduced(ranks: Ranks) -> None:
    ranks.run(_accumulate_in_some_blocks)


def _zero_grad(rank: int, world_size: int, set_to_none: bool) -> None:
    twins = Twins(rank, world_size, Stack(2).double())
    for step in range(3):
        twins.backward(2 * step)
        twins.backward(2 * step + 1)  # accumulates into the gradients of the first
        twins.update(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in twins.sharded.parameters())


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_accumulate_in_place_after_zero_grad(ranks: Ranks, set_to_none: bool) -> None:
    ranks.run(_zero_grad, set_to_none)


# Elementwise optimizers. Those that need norms or products of whole parameters (LBFGS, Muon, Adafactor) are refused.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov, weight decay": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD, maximize, for-loop": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, foreach=False),
    "Adam, for-loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RMSprop, centred": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "two parameter groups": lambda p: torch.optim.AdamW([{"params": p[:3]}, {"params": p[3:], "lr": 0.1}], lr=0.01),
}


def _train_with_optimizers(rank: int, world_size: int, strategy: str) -> dict[str, str]:
    twins = Twins(rank, world_size, TinyParameters().double(), tolerance=1e-8, sharding_strategy=strategy)
    twins.train(steps=1)
    start = full_state_dict(twins.sharded)
    wrong = {}
    for name, optimizer in OPTIMIZERS.items():
        twins.sharded.load_original_state_dict(start)
        twins.reference.load_state_dict(start)
        twins.use(optimizer)
        try:
            twins.train(steps=3)
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


@only_zero3
def test_torch_optimizers_work_on_shards(ranks: Ranks, strategy: str) -> None:
    assert ranks.run(_train_with_optimizers, strategy) == [{}, {}]


#
# Memory
#


class _WatchMemory(TorchDispatchMode):
    """Records copies that read from given ranges of addresses, and the bytes of every storage that an operator allocates."""

    COPIES = ("cat", "stack", "copy", "clone", "to_copy", "pad", "index", "repeat", "gather", "split_with_sizes_copy")

    def __init__(self, watched: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.watched = tuple(watched)
        self.copies: list[str] = []
        self.allocated_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0].strip("_")
        if func.namespace == "aten":
            sources = inputs[1:] if name == "copy" else inputs
            if name in self.COPIES and any(b <= t.data_ptr() < e for t in sources for b, e in self.watched):
                self.copies.append(f"{func.name()} of {[tuple(t.shape) for t in sources]}")
            known = {local_rows(t).untyped_storage().data_ptr() for t in inputs}
            for out in torch.utils._pytree.tree_leaves(result):
                if isinstance(out, torch.Tensor) and (out := local_rows(out)).untyped_storage().data_ptr() not in known:
                    self.allocated_bytes.append(out.untyped_storage().nbytes())
        return result


def _addresses(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


def _watch_a_step(rank: int, world_size: int, strategy: str) -> None:
    model = Stack(3, width=16).double()
    smallest_matrix_bytes = 3 * 16 * 8
    sharded = thunder.jit(model, transforms=[transform := fsdp(sharding_strategy=strategy)])
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    (x,) = model.inputs(torch.Generator().manual_seed(rank), batch=1)  # activations are smaller than any matrix

    def memory() -> dict[Any, tuple[int, int]]:
        arenas = {a for b in transform.sharded.buckets for a in (b.arena, b.private_slot and b.private_slot.arena) if a}
        return {a: _addresses(a._memory) for a in arenas if a._memory is not None}

    for _ in range(2):
        loss_of(sharded(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = memory()
    shards = [_addresses(b.shard) for b in transform.sharded.buckets]

    with _WatchMemory([*before.values(), *shards]) as forward:
        loss = loss_of(sharded(x))
    assert forward.copies == []
    assert max(forward.allocated_bytes) < smallest_matrix_bytes, (
        "forward must not allocate memory for unsharded parameters"
    )

    with _WatchMemory([*before.values(), *shards]) as backward:
        loss.backward()
    assert backward.copies == []
    large = [n for n in backward.allocated_bytes if n >= smallest_matrix_bytes]
    matrices = sum(p.ndim == 2 for p in sharded.parameters())
    # One gradient for each matrix, and one buffer of sharded gradients for each bucket.
    assert len(large) <= matrices + len(transform.plan), large

    assert memory() == before
    for bucket, params in zip(transform.sharded.buckets, transform.plan, strict=True):
        grads = [sharded.get_parameter(p.name).grad.to_local() for p in params.params]
        assert len({g.untyped_storage().data_ptr() for g in grads}) == 1, (
            "sharded gradients must be views of one buffer"
        )
        assert all(
            sharded.get_parameter(p.name).to_local().untyped_storage().data_ptr()
            == bucket.shard.untyped_storage().data_ptr()
            for p in params.params
        )


@each_strategy
def test_a_step_copies_no_parameters_and_allocates_no_unsharded_ones(ranks: Ranks, strategy: str) -> None:
    ranks.run(_watch_a_step, strategy)


def _unsharded_bytes(rank: int, world_size: int, blocks: int) -> int:
    twins = Twins(rank, world_size, Stack(blocks, width=8).double())
    twins.train(steps=1)
    (arena,) = {b.arena for b in twins.transform.sharded.buckets}
    return arena.nbytes


def test_zero3_needs_no_more_unsharded_memory_for_more_blocks(ranks: Ranks) -> None:
    assert ranks.run(_unsharded_bytes, 4) == ranks.run(_unsharded_bytes, 6)


#
# Other transforms, and other options
#


class _AddComments(thunder.Transform):
    """A transform that inserts a comment before every multiplication and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def transform_module(self, model: Any) -> None:
        self.calls.append("module")

    def transform_traces_pre_prologue(self, prologue: Any, computation: Any, epilogue: Any, **kwargs: Any) -> Any:
        self.calls.append("pre prologue")
        return prologue, computation, epilogue

    def transform_trace_post_optimization(self, computation: Any, **kwargs: Any) -> Any:
        self.calls.append("post optimization")
        commented = from_trace(computation)
        for bsym in computation.bound_symbols:
            if bsym.sym.name in ("mul", "linear"):
                commented.bound_symbols.append(prims.comment.bind("a comment", output=None))
            commented.bound_symbols.append(bsym)
        return commented


def _train_between_transforms(rank: int, world_size: int, strategy: str) -> None:
    before, after = _AddComments(), _AddComments()
    twins = Twins(rank, world_size, Stack(2).double(), before=[before], after=[after], sharding_strategy=strategy)
    twins.train(steps=2)
    assert before.calls == after.calls == ["module", "pre prologue", "post optimization", "post optimization"]
    assert str(thunder.last_traces(twins.sharded)[-1]).count("a comment") == 2 * 6


@only_zero3
def test_other_transforms_may_come_before_and_after(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_between_transforms, strategy)


def _train_materialized(rank: int, world_size: int, order: str) -> None:
    torch.manual_seed(5)
    model = TinyParameters().double()
    reference = copy.deepcopy(model)
    materialize = MaterializationTransform(
        "cpu", init=MaterializationTransform.init_from_original_state_dict(model.state_dict())
    )
    transforms = [fsdp(device="cpu"), materialize]
    sharded = thunder.jit(model.to("meta"), transforms=transforms if order == "after" else transforms[::-1])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, reference)]
    for _ in range(2):
        (x,) = model.inputs(torch.Generator().manual_seed(1))  # the same on all ranks
        for m, optimizer in zip((sharded, reference), optimizers, strict=True):
            loss_of(m(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(sharded).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", ["before", "after"])
def test_module_on_the_meta_device_is_materialized(ranks: Ranks, order: str) -> None:
    ranks.run(_train_materialized, order)


def _train_with_autocast(rank: int, world_size: int, strategy: str) -> None:
    model = Stack(2)
    twins = Twins(rank, world_size, model, tolerance=0, jit_reference=True, sharding_strategy=strategy)
    twins.make_inputs = lambda *args, **kwargs: tuple(x.float() for x in model.inputs(*args, **kwargs))
    with saved_for_backward() as saved, torch.autocast("cpu", torch.bfloat16):
        twins.train(steps=2)
    assert any(t.dtype is torch.bfloat16 for t in saved)
    _check_nothing_saved_in_arena(twins, saved)


@only_zero3
def test_autocast_is_bit_equal_to_the_unsharded_compiled_model(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train_with_autocast, strategy)


def _ignore_parameters(rank: int, world_size: int) -> None:
    model = Stack(2).double()
    reference = copy.deepcopy(model)
    ignored = [model.blocks[0].up.weight, "last.bias"]
    sharded = thunder.jit(model, transforms=[transform := fsdp(ignored_params=ignored)])
    names = {"blocks.0.up.weight", "last.bias"}
    assert not names & {n for bucket in transform.plan for p in bucket.params for n in p.names}
    (x,) = model.inputs(torch.Generator().manual_seed(rank))
    loss_of(sharded(x)).backward()
    loss_of(reference(x)).backward()
    for name in names:  # unsharded, with the gradient of this rank's batch only
        ours, theirs = sharded.get_parameter(name), reference.get_parameter(name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert set(full_state_dict(sharded)) == set(reference.state_dict())


def test_ignored_parameters_are_neither_sharded_nor_reduced(ranks: Ranks) -> None:
    ranks.run(_ignore_parameters)


def _broadcast(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = Buffers().double()
    theirs = [model.state_dict()]
    dist.broadcast_object_list(theirs, src=1)
    sharded = thunder.jit(model, transforms=[fsdp(broadcast_from=1)])
    for name, value in full_state_dict(sharded).items():
        torch.testing.assert_close(value, theirs[0][name], rtol=0, atol=0)


def test_broadcast_from_gives_every_rank_the_same_parameters_and_buffers(ranks: Ranks) -> None:
    ranks.run(_broadcast)


def _train_over_groups(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    Twins(rank, world_size, Stack(1).double(), mesh=mesh["shard"], device="cpu").train(steps=1)
    groups = [dist.new_group([r]) for r in range(world_size)]
    alone = Twins(rank, 1, Stack(1).double(), group=groups[rank], process_group=groups[rank])
    alone.train(steps=2)
    assert all(
        tuple(p.shape) == tuple(alone.reference.get_parameter(n).shape) for n, p in alone.sharded.named_parameters()
    )


def test_sharding_over_a_mesh_dimension_and_over_a_group_of_one_rank(ranks: Ranks) -> None:
    ranks.run(_train_over_groups)
