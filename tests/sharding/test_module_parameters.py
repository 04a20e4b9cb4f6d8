"""The module's parameters become the shards, and code that would take them for unsharded parameters is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from coded import coded
from models import Chain, Halves, Model, Stack
from ranks import on_ranks
from saving import Holder, assert_equal
from scenario import Run, loss_of, sgd
from torch import nn

X = torch.ones(2, 4)


@on_ranks()
def test_optimizers_and_functions_of_modules_work_on_shards() -> None:
    model = Stack(1).double()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    loss_of(model(torch.ones(2, 4, dtype=torch.float64)))  # autograd has seen the unsharded shapes
    run = Run(model)
    for name, shape in shapes.items():
        shard = model.get_parameter(name)
        assert shard is run.model.get_parameter(name) and hasattr(shard, "to_local") and shard.shape == shape
    assert model.first.weight.to_local().shape[0] < 4
    # Optimizers over the parameters of a module that holds the jitted one, and of submodules.
    run.optimizers = [torch.optim.AdamW(Holder(m).parameters(), lr=0.1) for m in (run.model, run.reference)]
    run.train(steps=1)
    models = (model, run.reference)
    run.optimizers = [
        torch.optim.AdamW([{"params": m.first.parameters(), "lr": 0.01}, {"params": m.last.parameters()}], lr=0.1)
        for m in models
    ]
    run.train(steps=1)
    # zero_grad of a submodule, in-place initialization, and loading unsharded entries.
    run.micro_batch(no_sync=False)
    for m in models:
        m.last.zero_grad()
    assert model.last.weight.grad is None and model.first.weight.grad is not None
    run.step()
    other = Stack(1).double()
    with torch.no_grad():
        for m in models:
            nn.init.constant_(m.first.weight, 0.25)
            m.blocks.apply(lambda module: nn.init.ones_(module.down.weight) if hasattr(module, "down") else None)
            m.last.weight.data.mul_(2)
    run.forward()
    for path in ("blocks", ""):
        for m in models:
            m.get_submodule(path).load_state_dict(other.get_submodule(path).state_dict())
        run.forward(grad=False)


@on_ranks()
def test_a_backward_that_skips_an_unfrozen_layer_reduces_its_unreduced_gradients() -> None:
    model = Halves(4).double()
    model.blocks[1].requires_grad_(False)
    run = Run(model)
    run.freeze("blocks.1.weight", frozen=False)
    run.use(sgd)
    run.micro_batch(0, False)
    run.micro_batch(1, True, no_sync=False)
    run.step()


@on_ranks()
def test_parameters_from_the_meta_device_keep_attributes_and_hooks() -> None:
    with torch.device("meta"):
        module = Stack(0)
    module.first.weight.group = "matrices"
    hook_calls: list[str] = []
    module.first.weight.register_hook(lambda grad: hook_calls.append("grad"))
    module.last.bias.register_post_accumulate_grad_hook(lambda p: hook_calls.append("accumulated"))
    names, ignored = [name for name, _ in module.named_parameters()], module.last.weight
    options = {
        "init": tfs.Init(device="cpu", param_init_fn=lambda m: m.reset_parameters(), ignored_params=["last.weight"])
    }
    model = thunder.jit(module, transforms=[fsdp(**options)])
    assert all(module.get_parameter(name) is model.get_parameter(name) for name in names)
    assert not any(param.is_meta for param in module.parameters()) and module.last.weight is ignored
    assert module.first.weight.group == "matrices" and not hasattr(module.first.weight, "_thunder_device")
    loss_of(model(torch.ones(2, 4))).backward()
    assert sorted(hook_calls) == ["accumulated", "grad"]


FORMER = {
    "a step": lambda params, optimizer: optimizer.step(),
    "a step of an optimizer for old and new": lambda params, optimizer: torch.optim.SGD(params, 0.1).step(),
    "clipping by norm": lambda params, optimizer: nn.utils.clip_grad_norm_(params[-1:], 1.0),
    "clipping by value": lambda params, optimizer: nn.utils.clip_grad_value_(params, 1.0),
    "reading a gradient": lambda params, optimizer: params[-1].grad + 1,
    "a scaler": lambda params, optimizer: _unscale(optimizer),
    "a loss": lambda params, optimizer: params[-1].sum().backward(),
    "a hook": lambda params, optimizer: params[-1].register_hook(print),
    "a hook after accumulation": lambda params, optimizer: params[-1].register_post_accumulate_grad_hook(print),
    "sharding again": lambda params, optimizer: thunder.jit(_holding(params[-1]), transforms=[fsdp()]),
}


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _holding(param: nn.Parameter) -> nn.Module:
    module = nn.Linear(1, 1)
    module.bias = param
    return module


@pytest.mark.parametrize("meta", [False, True])
@on_ranks()
def test_parameters_from_before_sharding_are_refused_wherever_they_are_used(meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        module = Stack(0)
    former = module.last.bias
    early = torch.optim.AdamW(module.parameters(), lr=0.1)
    hidden = _HidesParameters(module.last.parameters())
    model = thunder.jit(
        module, transforms=[fsdp(init=tfs.Init(device="cpu", param_init_fn=lambda m: m.reset_parameters()))]
    )
    loss_of(model(torch.ones(2, 4))).backward()
    before = full_state_dict(model)
    for use in FORMER.values():
        with pytest.raises(RuntimeError, check=coded("parameter.taken-before-jit", "last.bias")):
            use([module.first.weight, former], torch.optim.SGD([former], 0.1))
    for step in (early.step, hidden.step):
        with pytest.raises(RuntimeError, check=coded("parameter.taken-before-jit", "weight")):
            step()
    # An optimizer that torch does not know, and that skips parameters without gradients, trains nothing silently.
    hidden.zero_grad()
    hidden.step()
    with pytest.raises(RuntimeError, check=coded("parameter.taken-before-jit", "last.weight")):
        model(torch.ones(2, 4))
    del former, early, hidden, step
    loss_of(model(torch.ones(2, 4))).backward()
    assert_equal(full_state_dict(model), before)


class _HidesParameters:
    """An optimizer that is none of torch's."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            if param.grad is not None:
                param -= param.grad


REFUSED: list[tuple[Callable[[Any, nn.Module], Any], type[Exception], coded]] = [
    (lambda model, part: part(X), RuntimeError, coded("module.part-called-by-itself")),
    (lambda model, part: torch.jit.script(part), AttributeError, coded("module.sharded-hooks-scripted")),
    (
        lambda model, part: part.load_state_dict(part.state_dict(), assign=True),
        ValueError,
        coded("state-dict.assign-to-sharded-parameter", "weight"),
    ),
    (
        lambda model, part: thunder.jit(part, transforms=[fsdp()]),
        ValueError,
        coded("parameter.already-a-shard", "weight"),
    ),
    (lambda model, part: thunder.jit(model, transforms=[fsdp()]), ValueError, coded("parameter.already-a-shard")),
    *(
        (lambda model, part, c=make_copy, h=holder: c(h(model, part)), TypeError, coded("module.sharded-model-copied"))
        for make_copy in (copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO()))
        for holder in (lambda model, part: part, lambda model, part: model, lambda model, part: Holder(model))
    ),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_part_without_parameters_can_be_copied(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    thunder.jit(module := Chain(lambda _: nn.Linear(4, 4), lambda _: nn.ReLU(), count=2), transforms=[fsdp()])
    assert torch.equal(make_copy(module.blocks[1])(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


@on_ranks()
def test_code_that_takes_rows_for_unsharded_parameters_is_refused() -> None:
    module = Stack(1)
    unsharded = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss_of(module(X)).backward()
    unsharded.step()
    with pytest.raises(ValueError, check=coded("parameter.gradient-before-sharding", "first.weight")):
        thunder.jit(module, transforms=[fsdp()])
    unsharded.zero_grad()
    model = thunder.jit(module, transforms=[fsdp()])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss = loss_of(model(X))
    optimizer.load_state_dict(unsharded.state_dict())
    refused = coded("optimizer.state-of-unsharded-run", "AdamW: state 'exp_avg' of parameter 'first.weight'", "(4, 4)")
    with pytest.raises(ValueError, check=refused):
        optimizer.step()
    [bucket] = [b for b in model._lc_transforms[-1].sharded.buckets if b.spec.name == "last"]
    bucket.write_rows(0, bucket.rows[0].of(torch.zeros(3, 4)))  # as loading does, between forward and backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for use, error, refusal in REFUSED:
        for part in (module, module.blocks[0]):
            with pytest.raises(error, check=refusal):
                use(model, part)
    with tfs.eager(model) as eager_module:
        assert eager_module.first(X).shape == (2, 4)
    expected = model(X).detach()
    del loss  # torch refuses to convert parameters of a graph that is still alive

    # Replaced parameters and submodules are refused on a cache hit, and accepted again when they are put back.
    for owner, name, new, what in (
        (module.last, "weight", nn.Parameter(torch.ones(3, 4)), "parameter 'last.weight'"),
        (module, "last", copy.copy(module.last), "submodule 'last'"),
        (module.blocks, "0", copy.copy(module.blocks[0]), "submodule 'blocks.0'"),
    ):
        old = getattr(owner, name)
        setattr(owner, name, new)
        for use in (lambda: model(X), lambda: full_state_dict(model), lambda: tfs.clip_grad_norm_(model, 1.0)):
            with pytest.raises(RuntimeError, check=coded("module.part-replaced-after-jit", what)):
                use()
        setattr(owner, name, old)
    assert torch.equal(model(X), expected)

    # Conversions to another dtype are refused on a cache hit.
    module.last.bfloat16()
    refused = coded("module.converted-after-sharding", "last.weight", "float32", "bfloat16", "mp_policy")
    for use in (lambda: model(X), lambda: model(torch.ones(3, 4)), model.state_dict):
        with pytest.raises(RuntimeError, check=refused):
            use()
    module.last.float()
    with pytest.raises(RuntimeError, check=coded("parameter.outside-shard-buffer", "last.weight")):
        model(X)


class ReadsThroughList(Model):
    """A model that reads a parameter through a list."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.hidden = {"weights": [self.a.bias]}
        self.through_list = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b.forward(torch.tanh(self.a.forward(x)))
        return x + self.hidden["weights"][0].sum() if self.through_list else x


class ReadsUnregistered(Model):
    """A model that reads a parameter that no module has registered, or one that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.__dict__["foreign"] = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a.forward(x) + self.foreign


def _keep_views(module: Any) -> None:
    module.detached = {"views": [module.first.weight.detach()[:2]]}


def _share_bias(module: Any) -> None:
    module.last.bias = nn.Parameter(module.first.bias.data[:3])


# A change, options, and what shares memory with a parameter.
SHARES_MEMORY: list[tuple[Callable[[Any], object], dict[str, Any], str, str]] = [
    (_keep_views, {}, "attribute \"detached['views'][0]\"", "'first.weight'"),
    (lambda m: m.register_buffer("shown", m.first.weight.detach()[0]), {}, "buffer 'shown'", "'first.weight'"),
    (_share_bias, {"init": tfs.Init(ignored_params=["last.bias"])}, "ignored parameter 'last.bias'", "'first.bias'"),
]


@on_ranks()
def test_parameters_that_forward_does_not_read_by_their_names_are_refused() -> None:
    module = ReadsThroughList()
    model = thunder.jit(module, transforms=[fsdp()])
    assert module.hidden["weights"][0] is module.a.bias
    with pytest.raises(ValueError, check=coded("parameter.read-by-other-path", "self.hidden['weights'][0]", "a.bias")):
        model(X)
    refused = coded("module.parameter-held-beside-name", "hidden['weights'][0]", "a.bias")
    with pytest.raises(RuntimeError, check=refused):
        tfs.eager(model).__enter__()
    module.through_list = False
    model(X)
    assert module.hidden["weights"][0] is module.a.bias
    for change, options, *names in SHARES_MEMORY:
        change(sharing := Stack(1))
        with pytest.raises(ValueError, check=coded("parameter.memory-shared-with-other-tensor", *names)):
            thunder.jit(sharing, transforms=[fsdp(**options)])
    foreign = thunder.jit(ReadsUnregistered(), transforms=[fsdp()])
    with pytest.raises(ValueError, check=coded("parameter.not-registered", "self.foreign")):
        foreign(X)
    module = ReadsUnregistered()
    del module.__dict__["foreign"]
    late = thunder.jit(module, transforms=[fsdp()])
    module.foreign = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, check=coded("parameter.added-after-jit", "foreign")):
        late(X)


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "class": lambda module, argument: module.in_class,
    "object": lambda module, argument: module.namespace.held,
    "function": lambda module, argument: module.function.held,
    "argument": lambda module, argument: argument,
}


def _reading(way: str, view: torch.Tensor) -> nn.Module:
    """Return a module whose forward reads a tensor that something holds."""

    class Reads(nn.Module):
        in_class = view

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.namespace, self.function = SimpleNamespace(held=view), lambda: None
            self.function.held = view

        def forward(self, x: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
            return (self.b(x) @ (view if way == "closure" else WAYS[way](self, argument))).sum()

    return Reads()


@pytest.mark.parametrize("way", ["closure", *WAYS])
@on_ranks()
def test_forward_must_not_read_a_view_created_before_sharding(way: str) -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4)
    view = weight.detach().t()
    torch.manual_seed(0)
    with_copy = _reading(way, copy := view.clone())
    module = _reading(way, view)
    module.a.weight = weight
    model = thunder.jit(module, transforms=[fsdp()])
    for _ in range(2):  # the second call is refused as well
        with pytest.raises(ValueError, check=coded("module.reads-old-view-of-parameter", "a.weight")):
            model(x, view)
    expected = with_copy(x, copy)
    assert torch.allclose(thunder.jit(with_copy, transforms=[fsdp()])(x, copy), expected)


@on_ranks()
def test_no_op_conversions_and_failed_traces_do_not_damage_the_shards() -> None:
    for cache in ("no caching", "constant values"):
        model = thunder.jit(Stack(1), transforms=[fsdp()], cache=cache)
        for size in (2, 2, 3):
            assert model.to("cpu").float()(torch.ones(size, 4)).shape == (size, 3)
        assert model.first.weight.to_local().shape == (2, 4)
        with pytest.raises(Exception, match=r"(?i)shape|dim|broadcast|size|mul"):
            model(torch.ones(2, 5))  # while tracing
        assert model.first.weight.to_local().shape == (2, 4) and model._model.first._forward_pre_hooks
