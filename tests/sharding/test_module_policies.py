"""Per-module use as in FSDP2: strategies and precisions of modules, and calls of parts of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import ScheduleDisagreement, eager, fsdp, testing

import pytest
import thunder
import torch
from coded import coded
from models import Calling, Chain, Layer, Model, Stack, TiedWeights
from ranks import on_ranks
from scenario import Run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

HIGH = MixedPrecisionPolicy(param_dtype=torch.float32)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OUTER = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)


class Scale(nn.Module):
    """A stand-in for a norm whose gradients Thunder and eager torch round equally."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Mixed(Model):
    """Linear layers, which run in bfloat16, between scales, which run in float32."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        members = {"scale": Scale(8), "linear": nn.Linear(8, 8, bias=False)}
        block = Calling(lambda self, x: torch.relu(self.linear(self.scale(x))), **members)
        self.blocks = nn.Sequential(block)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _train_with_two_strategies() -> None:
    def theirs(module: Any) -> nn.Module:
        for number, block in enumerate(module.blocks):
            fully_shard(block, reshard_after_forward=number != 1)
        return fully_shard(module, reshard_after_forward=True)

    def strategy(name: str, module: nn.Module) -> str | None:
        return "zero2" if name == "blocks.1" else None

    model = Stack(2, width=8, activation=torch.relu)
    run = Run(model, others=[theirs], oracle=None, dtype=torch.float32, optimizer=_adamw, sharding_strategy=strategy)
    run.train(batch=4)
    assert [b.name for b in run.transform.plan if b.options.sharding_strategy == "zero2"] == ["blocks.1"]
    schedule = run.transform.compiled[-1].schedule
    assert "blocks.1" not in {op.bucket for op in schedule.backward.of("fsdp_all_gather")}
    assert {op.bucket for op in schedule.forward if op.slot.startswith("own_")} == {"blocks.1"}


def _train_with_two_precisions() -> None:
    asked: list[str] = []

    def precision(name: str, module: nn.Module) -> MixedPrecisionPolicy:
        asked.append(name)
        return HIGH if isinstance(module, Scale) else LOW if name else OUTER

    def theirs(root: nn.Module) -> nn.Module:
        for module in list(root.modules())[:0:-1]:
            fully_shard(module, mp_policy=HIGH if isinstance(module, Scale) else LOW)
        return fully_shard(root, mp_policy=OUTER)

    run = Run(Mixed(), others=[theirs], oracle=None, dtype=torch.float32, optimizer=_adamw, mp_policy=precision)
    assert asked == [name for name, _ in Mixed().named_modules()], "each module is asked once, from the root down"
    run.train(batch=4)
    schedule = run.transform.schedules[-1]
    gathered = {op.bucket: op.dtype for op in schedule.forward.of("fsdp_all_gather")}
    assert gathered == {"blocks.0": "float32", "blocks.0.bfloat16": "bfloat16", "head": "bfloat16"}
    assert {op.dtype for op in schedule.backward.of("fsdp_reduce_scatter")} == {"float32"}
    with eager(run.model) as module:
        out = module(*run.inputs(batch=4))
    assert out.dtype is torch.float32 and torch.equal(out, run.forward(batch=4))


def _disagree(rank: int) -> None:
    of_up: dict[str, Callable[[str, Any], Any]] = {
        "sharding_strategy": lambda name, module: ["zero2", "zero3"][rank] if name == "blocks.0.up" else None,
        "mp_policy": lambda name, module: [LOW, HIGH][rank] if name == "blocks.0.up" else None,
        "bucketing_strategy": lambda name, param: "both" if rank and name.startswith("blocks.0.up") else name,
        "transport": lambda bucket, params: "coalesced" if rank and bucket == "blocks.0" else "flat",
    }
    for option, function in of_up.items():
        shown = "bucket" if option == "bucketing_strategy" else option
        with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", shown)):
            thunder.jit(Stack(1), transforms=[fsdp(**{option: function})])


@on_ranks()
def test_functions_of_the_module_decide_as_nested_calls_of_fsdp2_and_ranks_compare_them(rank: int) -> None:
    _train_with_two_strategies()
    _train_with_two_precisions()
    _disagree(rank)


def _plan(make: Any, **options: Any) -> Any:
    [compiled] = testing.compile_on_fake_ranks(lambda: (make(), (torch.ones(2, 4),)), 2, **options)
    return compiled


@pytest.mark.parametrize(("option", "answer"), [("sharding_strategy", "zero2"), ("mp_policy", LOW)])
def test_modules_that_share_a_parameter_must_be_decided_alike(option: str, answer: Any) -> None:
    with pytest.raises(ValueError, check=coded("option.tied-parameter-decided-twice", option)):
        _plan(TiedWeights, **{option: lambda name, module: answer if name == "head" else None})


def test_buckets_by_size_are_filled_separately_for_each_decision() -> None:
    compiled = _plan(
        lambda: Stack(4),
        bucketing_strategy=600,
        sharding_strategy=lambda name, module: "zero2" if name.endswith("down") else None,
    )
    gathers = compiled.schedule.forward.of("fsdp_all_gather")
    sizes = {op.bucket: op.nbytes for op in gathers if op.slot.startswith("own_")}
    assert sizes == {"blocks.0.down.weight": 512}, (
        "other parameters in between do not close the bucket of 4 * 128 bytes"
    )


#
# Submodules and methods that FSDP2 lets users call by themselves: through the jitted model, or eagerly
#


class Encoder(Chain):
    """Blocks; ``features`` is another way to run them."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.blocks[0](x))


class TwoParts(Model):
    """An encoder and a head. An argument of ``forward`` says what runs."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(lambda index: Layer(8, torch.relu), count=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, part: str = "all") -> torch.Tensor:
        if part == "encoder":
            return self.encoder(x)
        if part == "features":
            return self.encoder.features(x)
        return self.head.forward(self.encoder(x))


def _shard_parts(model: Any) -> nn.Module:
    for block in model.encoder.blocks:
        fully_shard(block)
    fully_shard(model.encoder)
    register_fsdp_forward_method(model.encoder, "features")
    return fully_shard(model)


@on_ranks()
def test_parts_train_through_the_jitted_model_and_run_eagerly_as_in_fsdp2() -> None:
    model = TwoParts()
    run = Run(model, others=[_shard_parts], oracle=None, dtype=torch.float32, optimizer=_adamw)
    for step, part in enumerate(("all", "encoder", "features")):
        run.micro_batch(step, part, no_sync=False)
        run.step()
    gathered = [{op.bucket for op in c.schedule.forward.of("fsdp_all_gather")} for c in run.transform.compiled]
    blocks = {"encoder.blocks.0", "encoder.blocks.1"}
    assert gathered == [{*blocks, "head"}, blocks, {"encoder.blocks.0"}], "a part must gather only its own parameters"
    x = torch.randn(4, 8)
    theirs = run.models[1]
    with torch.no_grad(), eager(run.model) as module:
        assert torch.equal(module.encoder(x), theirs.encoder(x))
        assert torch.equal(module.encoder.features(x), theirs.encoder.features(x))
    for owner in (run.model, model):
        with pytest.raises(RuntimeError, check=coded("module.part-called-by-itself", "encoder", "Encoder")):
            owner.encoder(x)
        with pytest.raises(RuntimeError, check=coded("module.part-called-by-itself", "encoder.blocks.0", "Layer")):
            owner.encoder.features(x)


#
# Policies of other releases of torch than the installed one
#


@dataclasses.dataclass(frozen=True)
class Policy(MixedPrecisionPolicy):
    """A stand-in for the policy of torch 2.15."""

    param_dtype_override_fn: Any = dataclasses.field(default=None, kw_only=True)


def scaled_linear() -> nn.Module:
    """Return a module that scales its input in a precision of its own, and then calls a linear layer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear((x * self.scale).to(self.weight.dtype), self.weight))

    scale, weight = torch.linspace(0.3, 1.7, 8), torch.linspace(-1.1, 1.3, 64).view(8, 8)
    return Calling(forward, scale=nn.Parameter(scale), weight=nn.Parameter(weight))


@on_ranks()
def test_a_function_overrides_the_precision_of_single_parameters(rank: int) -> None:
    asked: list[nn.Parameter] = []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return torch.float32 if param.ndim < 2 else None

    model = scaled_linear()
    params, x = list(model.parameters()), torch.linspace(0.1, 2.3, 24).view(3, 8)
    low = x.bfloat16()
    expected = torch.relu(nn.functional.linear((low * model.scale).bfloat16(), model.weight.bfloat16())).detach()
    policy = Policy(torch.bfloat16, torch.float32, param_dtype_override_fn=override)
    jitted = thunder.jit(model, transforms=[transform := fsdp(mp_policy=policy)])
    assert all(map(lambda own, given: own is given, asked, params)) and len(asked) == 2
    out = jitted(x)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    out.float().sum().backward()
    gathers = transform.compiled[-1].schedule.forward.of("fsdp_all_gather")
    assert {op.dtype for op in gathers} == {"float32", "bfloat16"}

    def on_one_rank(param: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if rank else None

    policy = Policy(torch.bfloat16, param_dtype_override_fn=on_one_rank)
    refusal = coded("ranks.ranks-disagree", "rank 0: scale: ", "mp_policy", "param_dtype=torch.float32")
    with pytest.raises(ScheduleDisagreement, check=refusal):
        thunder.jit(scaled_linear(), transforms=[fsdp(mp_policy=policy)])


def test_a_wrong_answer_about_a_parameter_names_it() -> None:
    def plan(policy: MixedPrecisionPolicy) -> None:
        testing.compile_on_fake_ranks(lambda: (Stack(1), (torch.ones(2, 4),)), 2, mp_policy=policy)

    policy = Policy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16)
    with pytest.raises(ValueError, check=coded("option.override-returned-other-dtype", "torch.float16", "first")):
        plan(policy)


def test_gradients_of_another_dtype_than_their_parameter_are_refused() -> None:
    def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
        model = Stack(1)
        model.last.weight.grad_dtype = torch.bfloat16
        return model, (torch.ones(2, 4),)

    with pytest.raises(ValueError, check=coded("parameter.grad-dtype-set", "last.weight", "torch.bfloat16")):
        testing.compile_on_fake_ranks(make, 2)


#
# How ranks compare functions among the options
#


def _made(factor: Any) -> Callable[..., Any]:
    return lambda name, grads: grads.mul_(factor)


class Hook:
    def __call__(self, name: str, grads: torch.Tensor) -> None: ...

    def method(self, name: str, grads: torch.Tensor) -> None: ...


@on_ranks()
def test_ranks_compare_functions_by_what_they_are(rank: int) -> None:
    def jit(**options: Any) -> None:
        thunder.jit(Stack(1), transforms=[fsdp(**options)])

    def first(name: str, module: nn.Module) -> str:
        return "zero3"

    def second(name: str, module: nn.Module) -> str | None:
        return "zero3" if name else None

    alike = [
        lambda name, module: "zero2",  # on two lines, which messages name, but ranks do not compare
        lambda name, module: "zero2",
    ]
    jit(sharding_strategy=alike[rank], all_reduce_hook=_made(2))
    second.__qualname__ = first.__qualname__
    lines = [f"at {__file__}:{f.__code__.co_firstlineno})" for f in (first, second)]
    with pytest.raises(ScheduleDisagreement, check=coded("ranks.ranks-disagree", "first with code", *lines)):
        jit(sharding_strategy=(first, second)[rank])
    with pytest.raises(
        ScheduleDisagreement,
        check=coded("ranks.ranks-disagree", "fsdp(all_reduce_hook=", "(factor=0) at", "(factor=1) at"),
    ):
        jit(all_reduce_hook=_made(rank))
