"""The module's parameters become the shards, and code that would take them for unsharded parameters is refused."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from models import Model, Stack
from profiles import mostly_zero3
from ranks import Ranks
from reference import Twins, loss_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


class Wrapper(nn.Module):
    """A module that holds a jitted module, as a user's training module may."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _train(rank: int, world_size: int, strategy: str) -> None:
    model = Stack(1).double()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    hook_calls: list[tuple[str, tuple[int, ...]]] = []
    model.first.weight.register_hook(lambda grad: hook_calls.append(("early", tuple(grad.shape))))
    loss_of(model(torch.ones(2, 4, dtype=torch.float64)))  # autograd has seen the unsharded shapes
    twins = Twins(rank, world_size, model, sharding_strategy=strategy)
    for name, shape in shapes.items():
        shard = model.get_parameter(name)
        assert shard is twins.sharded.get_parameter(name) and isinstance(shard, DTensor) and shard.shape == shape
    assert model.first.weight.to_local().shape[0] < 4
    whole = tuple(model.first.weight.shape)

    # A hook that was registered before thunder.jit, and one after it.
    model.first.weight.register_post_accumulate_grad_hook(lambda p: hook_calls.append(("late", tuple(p.grad.shape))))
    twins.train(steps=2)
    assert hook_calls == [("early", whole), ("late", whole)] * 2

    # Optimizers over the parameters of a module that holds the jitted one, and of submodules.
    twins.optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1) for m in (Wrapper(twins.sharded), Wrapper(twins.reference))
    ]
    twins.train(steps=1)
    twins.optimizers = [
        torch.optim.AdamW([{"params": m.first.parameters(), "lr": 0.01}, {"params": m.last.parameters()}], lr=0.1)
        for m in (model, twins.reference)
    ]
    twins.train(steps=1)

    # Parameters frozen after compiling, and then trained again.
    models, compiled = (model, twins.reference), len(twins.transform.compiled)
    twins.use(_sgd)
    twins.optimizers = [_sgd(m.parameters()) for m in models]
    for m in models:
        m.zero_grad()
        m.blocks.requires_grad_(False)
        m.first.bias.requires_grad_(False)
    twins.backward()
    assert len(twins.transform.compiled) == compiled + 1
    assert model.blocks[0].up.weight.grad is None and model.first.bias.grad is None
    twins.update()
    for m in models:
        m.requires_grad_(True)
    twins.train(steps=1)
    assert len(twins.transform.compiled) == compiled + 1

    # zero_grad of a submodule, in-place initialization, and loading unsharded entries.
    twins.backward()
    for m in models:
        m.last.zero_grad()
    assert model.last.weight.grad is None and model.first.weight.grad is not None
    twins.update()
    with torch.no_grad():
        for m in models:
            nn.init.constant_(m.first.weight, 0.25)
            m.blocks.apply(lambda module: nn.init.ones_(module.down.weight) if hasattr(module, "down") else None)
            m.last.weight.data.mul_(2)
    twins.forward()
    other = Stack(1).double()
    for m in models:
        m.first.load_state_dict(other.first.state_dict())
        m.blocks.load_state_dict(other.blocks.state_dict())
    twins.forward()
    model.load_state_dict(other.state_dict())
    twins.reference.load_state_dict(other.state_dict())
    twins.train(steps=1)


@mostly_zero3
def test_optimizers_hooks_and_freezing_work_on_the_module(ranks: Ranks, strategy: str) -> None:
    ranks.run(_train, strategy)


class OptionalLayer(Model):
    """A model that may skip its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.requires_grad_(False)
        self.use_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first.forward(x))
        return self.second.forward(x) if self.use_second else x


def _unfreeze(rank: int, world_size: int) -> None:
    model = OptionalLayer().double()
    twins = Twins(rank, world_size, model)
    for m in (model, twins.reference):
        m.second.requires_grad_(True)
    with twins.sharded.no_sync():
        twins.backward()
    for m in (model, twins.reference):
        m.use_second = False
    twins.backward(step=1)
    twins.optimizers = [_sgd(m.parameters()) for m in (model, twins.reference)]
    twins.update()


def test_unreduced_gradients_of_an_unfrozen_layer_are_reduced_by_a_backward_that_skips_it(ranks: Ranks) -> None:
    ranks.run(_unfreeze)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last.forward(torch.tanh(self.first.forward(x)))


def _train_from_meta(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    expected = Plain()
    for linear in (expected.first, expected.last):
        linear.reset_parameters()
    with torch.device("meta"):
        module = Plain()
    module.first.weight.group = "matrices"
    hook_calls = []
    module.first.weight.register_hook(lambda grad: hook_calls.append("grad"))
    module.last.bias.register_post_accumulate_grad_hook(lambda p: hook_calls.append("accumulated"))
    before = dict(module.named_parameters())
    torch.manual_seed(3)
    torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
    options = {"device": "cpu", "param_init_fn": lambda m: m.reset_parameters(), "ignored_params": ["last.weight"]}
    model = thunder.jit(module, transforms=[fsdp(**options)])
    assert all(module.get_parameter(n) is model.get_parameter(n) for n in before)
    assert not any(param.is_meta for param in module.parameters())
    assert module.last.weight is before["last.weight"]
    assert module.first.weight.group == "matrices" and not hasattr(module.first.weight, "_thunder_device")
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, expected))
    x = torch.ones(2, 4)  # the same on all ranks, so that gradients need no averaging
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for _ in range(2):
        for m, o, scaler in zip((model, expected), (optimizer, theirs), scalers, strict=True):
            scaler.scale(loss_of(m(x))).backward()
            scaler.unscale_(o)
            scaler.step(o)
            scaler.update()
            o.zero_grad()
    assert sorted(hook_calls) == ["accumulated"] * 2 + ["grad"] * 2
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_parameters_from_the_meta_device_keep_attributes_and_hooks(ranks: Ranks) -> None:
    ranks.run(_train_from_meta)


def _use_without_values(rank: int, world_size: int) -> None:
    def on_meta() -> Plain:
        with torch.device("meta"):
            return Plain()

    x = torch.ones(2, 4)
    model = thunder.jit(on_meta(), transforms=[fsdp(device="cpu")])
    nn.init.normal_(model.get_submodule("first").weight)
    model.get_submodule("last").bias.data.zero_()
    for call in (lambda: model(x), lambda: tfs.eager(model).__enter__()):
        with pytest.raises(RuntimeError, match=r"have no values yet: (first\.bias, last\.weight|last\.weight)\. Give"):
            call()
    for name in ("first.bias", "last.weight"):
        model.get_parameter(name).data.fill_(0.5)
    model(x)

    # An initialization that omits a parameter, and buffers that were never created.
    def initialize_weights_only(module: nn.Module) -> None:
        nn.init.ones_(module.weight)

    model = thunder.jit(on_meta(), transforms=[fsdp(device="cpu", param_init_fn=initialize_weights_only)])
    with pytest.raises(RuntimeError, match=r"have no values yet: first\.bias, last\.bias\. Give"):
        model(x)
    module = on_meta()
    module.register_buffer("mask", torch.empty(4, device="meta"))
    model = thunder.jit(module, transforms=[fsdp(device="cpu")])
    model.load_original_state_dict(Plain().state_dict())
    with pytest.raises(RuntimeError, match=r"have no values yet: mask\. Give"):
        model(x)
    model = thunder.jit(on_meta(), transforms=[fsdp()])
    with pytest.raises(RuntimeError, match=r"have no values yet: first\.weight, first\.bias, last\.weight and 1 more"):
        model(x)


def test_errors_name_parameters_and_buffers_without_values(ranks: Ranks) -> None:
    ranks.run(_use_without_values)


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


def _use_former_parameters(rank: int, world_size: int, meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        module = Plain()
    former = module.last.bias
    early = torch.optim.AdamW(module.parameters(), lr=0.1)
    hidden = _HidesParameters(module.last.parameters())
    model = thunder.jit(module, transforms=[fsdp(device="cpu", param_init_fn=lambda m: m.reset_parameters())])
    loss_of(model(torch.ones(2, 4))).backward()
    before = full_state_dict(model)
    for use in FORMER.values():
        with pytest.raises(RuntimeError, match=r"parameter 'last.bias' was taken .* create optimizers after"):
            use([module.first.weight, former], torch.optim.SGD([former], 0.1))
    for step in (early.step, hidden.step):
        with pytest.raises(RuntimeError, match=r"parameter '(first|last).weight' was taken .* create optimizers after"):
            step()
    # An optimizer that torch does not know, and that skips parameters without gradients, trains nothing silently.
    hidden.zero_grad()
    hidden.step()
    with pytest.raises(RuntimeError, match=r"parameter 'last.weight' was taken"):
        model(torch.ones(2, 4))
    del former, early, hidden, step
    loss_of(model(torch.ones(2, 4))).backward()
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name])


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


@pytest.mark.parametrize("meta", [False, True])
def test_parameters_from_before_sharding_are_refused_wherever_they_are_used(ranks: Ranks, meta: bool) -> None:
    ranks.run(_use_former_parameters, meta)


def _misuse_sharded_parameters(rank: int, world_size: int) -> None:
    x = torch.ones(2, 4)
    module = Stack(1)
    unsharded = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss_of(module(x)).backward()
    unsharded.step()
    with pytest.raises(ValueError, match=r"'first\.weight' has a gradient.*zero_grad\(set_to_none=True\) before"):
        thunder.jit(module, transforms=[fsdp()])
    unsharded.zero_grad()
    model = thunder.jit(module, transforms=[fsdp()])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    loss = loss_of(model(x))
    loss.backward()

    optimizer.load_state_dict(unsharded.state_dict())
    with pytest.raises(ValueError, match=r"AdamW: state 'exp_avg' of parameter 'first\.weight' has the shape \(4, 4\)"):
        optimizer.step()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    optimizer.step()

    # Norms of all gradients, and of a submodule's.
    for params in (module.parameters(), module.last.parameters(), model.parameters()):
        params = list(params)
        whole = [p.grad.full_tensor() for p in params]
        for foreach in (None, False):
            norm = nn.utils.get_total_norm([p.grad for p in params], foreach=foreach)
            torch.testing.assert_close(norm.full_tensor(), nn.utils.get_total_norm(whole))
        torch.testing.assert_close(nn.utils.clip_grad_norm_(params, 1.0).full_tensor(), norm.full_tensor())
    grads = [p.grad for p in module.parameters()]
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    assert all(g.to_local().abs().max() <= 1e-3 for g in grads if g.to_local().numel())
    loss_of(model(x)).backward()  # accumulates
    tfs.clip_grad_norm_(model, 1.0)
    optimizer.zero_grad()
    loss = loss_of(model(x))
    [bucket] = [b for b in model._lc_transforms[-1].sharded.buckets if b.spec.name == "last"]
    bucket.copy_in(0, torch.zeros(3, 4))  # as loading does, between forward and backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    # Calls, copies and state dicts of modules that hold rows.
    for submodule, path in ((module, "the module"), (model.get_submodule("blocks.0"), r"blocks\.0")):
        with pytest.raises(RuntimeError, match=rf"{path} \(.*called by itself.*Call the jitted model, .*eager"):
            submodule(x)
        for make_copy in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                make_copy(submodule)
        with pytest.raises(AttributeError, match=rf"{path} of a sharded model has hooks that cannot be scripted"):
            torch.jit.script(submodule)
    for make_copy in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for holder in (model, Wrapper(model)):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                make_copy(holder)
    for replicated in (model, module):
        with pytest.raises(RuntimeError, match=r"sharded by thunder_fsdp_sched.*DistributedDataParallel would"):
            nn.parallel.DistributedDataParallel(replicated)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: the unsharded parameter has shape \(4, 4\)"):
        module.first.load_state_dict(
            {"weight": module.first.weight.to_local().detach().clone(), "bias": torch.zeros(4)}
        )
    with pytest.raises(ValueError, match=r"'weight' of a sharded model cannot be replaced; load without assign"):
        module.first.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
    for again in (module, model, nn.Sequential(module.first)):
        with pytest.raises(ValueError, match=r"is a shard already, of 'first\.weight'"):
            thunder.jit(again, transforms=[fsdp()])
    with tfs.eager(model) as eager_module:
        assert eager_module.first(x).shape == (2, 4)
    expected = model(x).detach()
    del loss  # torch refuses to convert parameters of a graph that is still alive

    # Replaced parameters and submodules are refused on a cache hit, and accepted again when they are put back.
    for owner, name in ((module.last, "weight"), (module, "last"), (module.blocks, "0")):
        old = getattr(owner, name)
        new = nn.Parameter(torch.ones(3, 4)) if name == "weight" else copy.copy(old)
        setattr(owner, name, new)
        what = "parameter 'last.weight'" if name == "weight" else "submodule '(last|blocks.0)'"
        for use in (lambda: model(x), lambda: full_state_dict(model), lambda: tfs.clip_grad_norm_(model, 1.0)):
            with pytest.raises(RuntimeError, match=rf"{what} of a sharded module was replaced or removed"):
                use()
        setattr(owner, name, old)
    assert torch.equal(model(x), expected)

    # Conversions to another dtype are refused on a cache hit.
    module.last.bfloat16()
    for batch in (x, torch.ones(3, 4)):
        with pytest.raises(
            RuntimeError, match=r"'last\.weight' was sharded as torch\.float32.*converted to torch\.bfloat16"
        ):
            model(batch)
    module.last.float()
    with pytest.raises(RuntimeError, match=r"'last\.weight' is no longer in the shard buffer"):
        model(x)


def test_code_that_takes_rows_for_unsharded_parameters_is_refused(ranks: Ranks) -> None:
    ranks.run(_misuse_sharded_parameters)


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


def _read_parameters_indirectly(rank: int, world_size: int) -> None:
    x = torch.ones(2, 4)
    module = ReadsThroughList()
    model = thunder.jit(module, transforms=[fsdp()])
    with pytest.raises(
        ValueError, match=r"reads self\.hidden\['weights'\]\[0\], which is parameter 'a\.bias'.*self\.a\.bias"
    ):
        model(x)
    with pytest.raises(RuntimeError, match=r"eager: hidden\['weights'\]\[0\] of the module holds parameter 'a\.bias'"):
        tfs.eager(model).__enter__()
    module.through_list = False
    model(x)
    module = Stack(1)
    module.detached = {"views": [next(module.parameters()).detach()[:2]]}
    with pytest.raises(ValueError, match=r"attribute \"detached\['views'\]\[0\]\" shares memory with parameter"):
        thunder.jit(module, transforms=[fsdp()])
    foreign = thunder.jit(ReadsUnregistered(), transforms=[fsdp()])
    with pytest.raises(ValueError, match=r"reads self\.foreign, a parameter.*register it as a parameter"):
        foreign(x)
    module = ReadsUnregistered()
    del module.__dict__["foreign"]
    late = thunder.jit(module, transforms=[fsdp()])
    module.foreign = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"reads parameter 'foreign', which the module did not have at thunder\.jit"):
        late(x)
    module = Stack(1)
    module.register_buffer("shown", module.first.weight.detach()[0])
    with pytest.raises(ValueError, match=r"buffer 'shown' shares memory with parameter 'first\.weight'.*Clone it"):
        thunder.jit(module, transforms=[fsdp()])
    module = Stack(1)
    module.last.bias = nn.Parameter(module.first.bias.data[:3])
    with pytest.raises(ValueError, match=r"ignored parameter 'last\.bias' shares memory with parameter 'first\.bias'"):
        thunder.jit(module, transforms=[fsdp(ignored_params=["last.bias"])])


def test_parameters_that_forward_does_not_read_by_their_names_are_refused(ranks: Ranks) -> None:
    ranks.run(_read_parameters_indirectly)


def _convert_with_policy(rank: int, world_size: int) -> None:
    model = thunder.jit(Stack(1), transforms=[fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))])
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"was sharded as torch\.float32.*converted to torch\.bfloat16.*mp_policy"):
        model(torch.ones(2, 4))
    for cache in ("no caching", "constant values"):
        model = thunder.jit(Stack(1), transforms=[fsdp()], cache=cache)
        for size in (2, 2, 3):
            assert model.to("cpu").float()(torch.ones(size, 4)).shape == (size, 3)
        assert model.first.weight.to_local().shape == (2, 4)
        with pytest.raises(Exception, match=r"(?i)shape|dim|broadcast|size|mul"):
            model(torch.ones(2, 5))  # while tracing
        assert model.first.weight.to_local().shape == (2, 4) and model._model.first._forward_pre_hooks


def test_no_op_conversions_and_failed_traces_do_not_damage_the_shards(ranks: Ranks) -> None:
    ranks.run(_convert_with_policy)
