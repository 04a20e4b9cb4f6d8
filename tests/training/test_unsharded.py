"""``unsharded``: changing whole parameters of a sharded model in place."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded, says
from internals import RowDTensor
from models import GPT, Experts, Layer, LoRALinear, Stack, TinyParameters
from ranks import on_ranks
from scenario import Run, everywhere
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy


class TiedRun(Run):
    """A run of which the jitted reference has tied parameters: Thunder's own state dict leaves out their other names."""

    def compare_parameters(self) -> None:
        for name, value in tfs.full_state_dict(self.model).items():
            self.close(value, self.reference._model.state_dict()[name], name)


def _operate(module: Any) -> None:
    """Change parameters as users do who know nothing of shards."""
    torch.manual_seed(5)  # the same on all ranks
    vocabulary = module.wte.weight  # tied
    vocabulary[3].zero_()
    vocabulary.copy_(vocabulary[torch.randperm(len(vocabulary))])
    nn.init.orthogonal_(module.h[0].up.weight)
    module.h[0].down.weight.data = module.h[0].down.weight.data.flip(1).t().contiguous().t()
    module.h[0].up.bias[1:4] += module.h[0].up.bias[5:8]
    module.ln_f.weight.mul_(0.5)
    module.ln_f.bias.fill_(0.1)  # ignored


@on_ranks(2)
def test_a_change_of_one_ranks_rows_counts_as_a_change_on_all_ranks() -> None:
    run = Run(TinyParameters().double())
    names = [
        name for name, (bucket, index) in run.transform.sharded.locations.items() if bucket.shard_views[index].numel()
    ]
    of_first, of_second = everywhere(names)
    name = min(set(of_first).difference(of_second))  # rank 1 has no rows of it
    run.forward(0)
    with tfs.unsharded(run.model, name) as module, torch.no_grad():
        module.get_parameter(name).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.backward()


@on_ranks(2)
def test_training_after_surgery_is_bit_equal_to_the_unsharded_model() -> None:
    model = GPT(width=4, blocks=1, vocab=7, length=5, tied=True, block=Layer).double()
    model.ln_f.bias.requires_grad_(False)
    run = TiedRun(model, tolerance=0, oracle="compiled", init=tfs.Init(ignored_params=["ln_f.bias"]))
    run.train(steps=1)
    shards = dict(model.named_parameters())
    with tfs.unsharded(run.model) as module:
        assert module is model and module.head.weight is module.wte.weight
        for params in (dict(module.named_parameters()), dict(run.model.named_parameters())):
            assert params.keys() == shards.keys()
            assert all(type(p) is nn.Parameter and p.is_leaf for p in params.values())
            assert {n: p.shape for n, p in params.items()} == {n: p.shape for n, p in shards.items()}
        for name, value in module.state_dict().items():
            assert torch.equal(value, run.reference._model.state_dict()[name])
        _operate(module)
    assert all(param is shards[name] for name, param in model.named_parameters())
    assert all(param is shards[name] for name, param in run.model.named_parameters())
    with torch.no_grad():
        _operate(run.reference._model)
    run.compare_parameters()
    # As shards are: matrix products of other strides may round differently, depending on the processor.
    down = run.reference._model.h[0].down.weight
    down.data = down.data.contiguous()
    run.train(steps=2)
    run.micro_batch(5)
    run.forward(6)
    with tfs.unsharded(run.model):  # nothing is changed, so the forward is still valid
        pass
    run.backward()
    run.compare_gradients()
    before = run.model.get_parameter("wte.weight").grad
    with tfs.unsharded(run.model, "head", "h.0.up.bias", model.ln_f) as module:
        whole = {name for name, param in module.named_parameters() if type(param) is nn.Parameter}
        assert whole == {"wte.weight", "h.0.up.bias", "ln_f.weight", "ln_f.bias"}
        assert isinstance(module.h[0].up.weight, RowDTensor)
        module.wte.load_state_dict({"weight": module.wte.weight.flip(0)})
        module.h[0].up.bias.requires_grad_(False)
    assert run.model.get_parameter("wte.weight").grad is before
    assert not model.h[0].up.bias.requires_grad and model.h[0].up.bias is shards["h.0.up.bias"]
    with torch.no_grad():
        run.reference._model.wte.weight.copy_(run.reference._model.wte.weight.flip(0))
    run.compare_parameters()


@on_ranks(2)
def test_adapters_are_merged_in_the_dtype_of_the_shards() -> None:
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False), "transport": "coalesced"},
    ):
        torch.manual_seed(1)
        plain = nn.Sequential(LoRALinear(5), LoRALinear(5))
        plain[1].weight = nn.Parameter(plain[1].weight.detach().t(), requires_grad=False)
        model = thunder.jit(copy.deepcopy(plain), transforms=[fsdp(**options)])
        for which in (plain, model):
            with tfs.unsharded(which) if which is model else torch.no_grad():
                module = plain if which is plain else model._model
                assert module[1].weight.stride() == (1, 5)
                for layer in module:
                    layer.weight += layer.b @ layer.a
                    layer.b.zero_()
        merged = tfs.full_state_dict(model)
        assert all(torch.equal(merged[name], value) for name, value in plain.state_dict().items())


@on_ranks(2)
def test_ranks_that_make_different_changes_get_an_error_or_those_of_one_rank(rank: int) -> None:
    transform = fsdp()
    model = thunder.jit(Stack(2), transforms=[transform])
    before = tfs.full_state_dict(model)

    def check(**changed: torch.Tensor) -> None:
        assert not transform.sharded.module_params.stand_ins and torch.is_grad_enabled()
        for name, value in tfs.full_state_dict(model).items():
            assert torch.equal(value, changed.get(name, before[name])), name

    different = coded("ranks.ranks-disagree", "rank 0: blocks.0.up.weight: ", "rank 1: blocks.0.up.weight: ")
    with pytest.raises(tfs.ScheduleDisagreement, check=different), tfs.unsharded(model) as module:
        module.first.weight.zero_()
        torch.manual_seed(rank)
        nn.init.orthogonal_(module.blocks[0].up.weight)
        module.last.bias[rank] += 1
    check()
    with tfs.unsharded(model, writeback=False) as module:
        module.first.weight.fill_(rank)
        whole = weakref.ref(module.first.weight)
    assert whole() is None, "whole parameters must be freed without garbage collection"
    check()
    with tfs.unsharded(model, from_rank=1) as module:
        module.first.weight.fill_(rank + 2)
        module.last.bias.data = torch.full((6,), float(rank))[::2]
    check(**{"first.weight": torch.full((4, 4), 3.0), "last.bias": torch.ones(3)})
    before = tfs.full_state_dict(model)

    # A failure on one rank is one on all ranks.
    failed = coded("ranks.ranks-disagree", "rank 0: ArithmeticError: a failure") if rank else says("^a failure$")
    with pytest.raises(tfs.ScheduleDisagreement if rank else ArithmeticError, check=failed):
        with tfs.unsharded(model) as module:
            module.first.weight.zero_()
            if rank == 0:
                raise ArithmeticError("a failure")
    check()
    code = "ranks.ranks-disagree" if rank else "parameter.changes-cannot-be-written-back"
    replaced = coded(code, "parameter 'first.weight' was replaced")
    with pytest.raises(tfs.ScheduleDisagreement if rank else RuntimeError, check=replaced):
        with tfs.unsharded(model) as module:
            if rank == 0:
                module.first.weight = nn.Parameter(torch.zeros(4, 4))
    check()
    refusal = coded("ranks.actions-differ", "first.weight first.bias of module", "last.weight last.bias of module")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        with tfs.unsharded(model, "last" if rank else "first"):
            pass
    check()


@on_ranks(2)
def test_misuse_is_refused_and_restores_the_module() -> None:
    module = Stack(2)
    model = thunder.jit(module, transforms=[transform := fsdp()])
    x = torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    before = tfs.full_state_dict(model)

    with tfs.unsharded(model):
        for use in (
            lambda: model(x),
            lambda: module(x),
            lambda: module.blocks[0](x),
            lambda: tfs.unsharded(model).__enter__(),
            lambda: tfs.eager(model).__enter__(),
            lambda: tfs.full_state_dict(model),
            lambda: tfs.stream_full_parameters(model),
            model.state_dict,
            lambda: tfs.get_model_state_dict(model),
        ):
            with pytest.raises(RuntimeError, check=coded("step.parameters-whole-inside-unsharded")):
                use()
    with tfs.eager(model), pytest.raises(RuntimeError, check=coded("step.unsharded-inside-eager")):
        tfs.unsharded(model).__enter__()

    def replace(value: torch.Tensor) -> None:
        module.first.bias.data = value

    for change, names in (
        (lambda: replace(torch.zeros(5)), ("'first.bias'", "torch.float32[5]")),
        (lambda: replace(torch.zeros(4).double()), ("'first.bias'", "torch.float64[4]")),
        (optimizer.step, ("the shard of 'first.weight'",)),
    ):
        refused = coded("parameter.changes-cannot-be-written-back", *names)
        with pytest.raises(RuntimeError, check=refused), tfs.unsharded(model):
            change()
    stepped = tfs.full_state_dict(model)
    assert all(not torch.equal(stepped[name], before[name]) for name in before)
    for arguments, options, expected in (
        (["blocks.2"], {}, coded("module.only-not-in-model", "'blocks.2'")),
        ([nn.Linear(2, 2)], {}, coded("module.only-not-in-model", "a Linear")),
        ([], {"from_rank": 2}, coded("ranks.from-rank-outside-model", "[0, 1]", "got 2")),
    ):
        with pytest.raises(ValueError, check=expected), tfs.unsharded(model, *arguments, **options):
            pass
    with tfs.unsharded(model):
        inside = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, check=coded("parameter.taken-before-jit", "first.weight")):
        inside.step()
    optimizer.step()
    for name, value in tfs.full_state_dict(model).items():
        torch.testing.assert_close(value, stepped[name] + stepped[name] - before[name])
    assert len(transform.compiled) == 1


@on_ranks(4)
def test_parameters_of_several_groups_are_changed_by_their_ranks(rank: int) -> None:
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(1)
    plain = Experts(rank % 2)
    model = thunder.jit(
        copy.deepcopy(plain),
        transforms=[fsdp(ranks=tfs.Ranks(process_group_for=lambda name, param: group if "expert" in name else None))],
    )
    with tfs.unsharded(model) as module:  # changes of one group are none of the other
        module.expert.weight[1:] += rank % 2 + 1
        module.first.bias.zero_()
    with tfs.unsharded(model, writeback=False) as module:
        assert torch.equal(module.expert.weight[1:], plain.expert.weight[1:] + rank % 2 + 1)
        assert torch.equal(module.expert.weight[:1], plain.expert.weight[:1]) and not module.first.bias.any()
    different = coded("ranks.ranks-disagree", "rank 0: expert.bias: ", "rank 2: expert.bias: ")
    with pytest.raises(tfs.ScheduleDisagreement, check=different), tfs.unsharded(model) as module:
        module.expert.bias.fill_(rank if rank % 2 == 0 else 0)
    with pytest.raises(ValueError, check=coded("ranks.from-rank-lacks-common-parameter", "expert.weight")):
        with tfs.unsharded(model, from_rank=0):
            pass
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicated = thunder.jit(
        copy.deepcopy(plain).requires_grad_(False), transforms=[fsdp(ranks=mesh, init=tfs.Init(broadcast_from=0))]
    )
    with tfs.unsharded(replicated, from_rank=3) as module:
        module.first.weight.fill_(rank)
    refusal = coded("ranks.ranks-disagree", "rank 0: first.bias: ", "rank 2: first.bias: ")
    with pytest.raises(tfs.ScheduleDisagreement, check=refusal):
        with tfs.unsharded(replicated) as module:
            module.first.bias.fill_(rank // 2)  # replicas differ
    whole = tfs.full_state_dict(replicated)
    assert whole["first.weight"].eq(3).all() and torch.equal(whole["first.bias"], plain.first.bias)


def test_whole_parameters_that_shared_a_storage_take_no_more_memory_than_they_need(one_rank: None) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for part, own in zip(module, torch.randn(3, 4, 4), strict=True):
        part.weight.data = own
    model = thunder.jit(module, transforms=[fsdp()])
    with tfs.unsharded(model):
        assert [p.untyped_storage().nbytes() for p in module.parameters()] == [64, 64, 64]
