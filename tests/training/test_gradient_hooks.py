"""Hooks, and backwards that ask for some gradients only: as without sharding, or an error on all ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import discard_unreduced, fsdp

import pytest
import thunder
import torch
from coded import coded
from models import Calling, Halves
from ranks import on_ranks
from scenario import loss_of, whole_of
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules import module as modules

WAYS = [("zero2", "unsharded"), ("zero3", "sharded")]
each_way = pytest.mark.parametrize(("strategy", "accumulate"), WAYS)


def _batch(seed: int) -> torch.Tensor:
    """A batch that is the same on all ranks, so that gradients need no averaging."""
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _both(module: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return an unsharded copy of a module and the sharded one."""
    reference = copy.deepcopy(module)
    return reference, thunder.jit(module, transforms=[fsdp(**options)])


def _waiting(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def _grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [whole_of(param.grad) for param in model.parameters()]


def _close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@on_ranks(2)
def test_hooks_see_the_reduced_gradient_once_in_a_window() -> None:
    """Also those from before sharding, until they are removed. The world counts calls of hooks in all histories."""
    torch.manual_seed(0)
    module = Halves(3).double()
    early: list[str] = []
    handles = [
        module.scale.register_hook(lambda grad: early.append("grad")),
        module.scale.register_post_accumulate_grad_hook(lambda param: early.append("accumulated")),
    ]
    reference, model = _both(module, accumulate="sharded")
    seen: dict[str, torch.Tensor] = {}
    for net in (reference, model):
        net.scale.register_hook(lambda grad: 2 * grad)
    model.scale.register_hook(lambda grad: seen.update(grad=grad.clone()))
    model.scale.register_post_accumulate_grad_hook(lambda param: seen.update(accumulated=param.grad.clone()))
    # The last micro-batch has no gradient of the scale.
    for micro_batch, first in enumerate((True, False)):
        for net in (reference, model):
            with contextlib.nullcontext() if micro_batch else _waiting(net):
                loss_of(net(_batch(micro_batch), first)).backward()
    assert early == ["grad", "accumulated"] and seen.keys() == {"grad", "accumulated"}
    for grad in seen.values():
        _close(grad.full_tensor(), reference.scale.grad)
    for handle in handles:
        handle.remove()
    register_multi_grad_hook((model.scale,), lambda grads: early.append("all"))
    loss_of(model(_batch(0), True)).backward()
    assert early == ["grad", "accumulated", "all"]


@each_way
@on_ranks(2)
def test_only_requested_gradients_accumulate(strategy: str, accumulate: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    reference, model = _both(module, sharding_strategy=strategy, accumulate=accumulate)

    def of_input(net: nn.Module, seed: int) -> torch.Tensor:
        x = _batch(seed).requires_grad_()
        return torch.autograd.grad(loss_of(net(x)), x)[0]

    def window(net: nn.Module) -> list[Any]:
        found = []
        with _waiting(net):
            loss_of(net(_batch(0))).backward()
            found.append(of_input(net, 1))
        # Outside of no_sync, while gradients wait for their reduction.
        found.append(of_input(net, 2))
        found += map(whole_of, torch.autograd.grad(loss_of(net(_batch(3))), list(net.parameters())))
        with _waiting(net):
            x = _batch(4).requires_grad_()
            loss_of(net(x)).backward(inputs=[x])
            found.append(x.grad)
        loss_of(net(_batch(5))).backward()
        return found + _grads(net)

    def some(net: nn.Module) -> list[Any]:
        net.zero_grad()
        inputs = list(net.parameters())[:1]
        with _waiting(net):
            loss_of(net(_batch(6))).backward(inputs=inputs)
        loss_of(net(_batch(7))).backward(inputs=inputs)
        return _grads(net)

    def twice(net: nn.Module) -> list[Any]:
        net.zero_grad()
        first, *others = net.parameters()
        with _waiting(net):
            loss = loss_of(net(_batch(8)))
            loss.backward(inputs=[first], retain_graph=True)
            loss.backward(inputs=others)
        loss_of(net(_batch(9))).backward()
        return _grads(net)

    for run in (window, twice, some):
        _close(run(model), run(reference))
    assert _grads(model)[1] is None

    model.zero_grad()
    weight = model.get_parameter("0.weight")
    with model.no_sync():
        loss = loss_of(model(_batch(0)))
        with pytest.raises(RuntimeError, check=coded("gradient.autograd-grad-under-no-sync", "0.weight")):
            torch.autograd.grad(loss, weight)
        loss_of(model(_batch(0))).backward()
    with pytest.raises(RuntimeError, check=coded("step.backward-for-some-parameters", "0.bias")):
        loss_of(model(_batch(1))).backward(inputs=[weight])
    discard_unreduced(model)
    reference.zero_grad()
    model.zero_grad()
    for net in (model, reference):
        loss_of(net(_batch(0))).backward()
    _close(_grads(model), _grads(reference))


def _outputs(self: Any, x: torch.Tensor) -> dict[str, Any]:
    """Return views, containers, and an input."""
    h = torch.tanh(self.linear.forward(x))
    return {"x": x, "halves": h.chunk(2, 1), "row": h[0].view(2, 2)}


@on_ranks(2)
def test_create_graph_and_checks_of_nan_are_refused() -> None:
    model = thunder.jit(Calling(_outputs, linear=nn.Linear(3, 4)).double(), transforms=[fsdp()])
    x = _batch(0).requires_grad_()

    def of(out: dict[str, Any]) -> list[torch.Tensor]:
        return [*out["halves"], out["row"]]

    for number in range(3):
        loss = of(model(x))[number].square().sum()
        with pytest.raises(NotImplementedError, check=coded("gradient.create-graph-unsupported")):
            torch.autograd.grad(loss, x, create_graph=True)
    for context in (contextlib.nullcontext(), model.no_sync()):
        with context, pytest.raises(NotImplementedError, check=coded("gradient.create-graph-unsupported")):
            loss_of(model(x)).backward(create_graph=True)
    with pytest.raises(NotImplementedError, check=coded("gradient.create-graph-unsupported")):
        torch.autograd.functional.hessian(lambda x: loss_of(of(model(x))), x)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(NotImplementedError, check=coded("gradient.anomaly-check-of-nan", "check_nan=False")),
    ):
        loss_of(of(model(x))).backward()
    assert x.grad is None and all(param.grad is None for param in model.parameters())
    out = model(x)
    torch.autograd.grad(out["x"].square().sum(), x, create_graph=True)  # nothing of the model is in its graph
    with torch.autograd.detect_anomaly(check_nan=False):
        loss_of(of(out)).backward()
    assert x.grad is not None and all(param.grad is not None for param in model.parameters())


class Triple(torch.autograd.Function):
    """The identity with three times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


def _tripled(module: nn.Module, grads: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(3 * grad for grad in grads)


@on_ranks(2)
def test_backward_hooks_that_thunder_ignores_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    module[0].register_forward_hook(lambda module, args, output: Triple.apply(output))
    reference, model = _both(module)
    x = _batch(0).requires_grad_()
    wheres: dict[str, tuple[str, Callable[[], Any]]] = {
        "full": ("submodule '1'", lambda: module[1].register_full_backward_hook(_tripled)),
        "pre": ("submodule '2'", lambda: module[2].register_full_backward_pre_hook(_tripled)),
        "old": ("submodule '1'", lambda: module[1].register_backward_hook(_tripled)),
        "root": ("the module that was given to thunder.jit", lambda: module.register_full_backward_hook(_tripled)),
        "all": ("all modules", lambda: modules.register_module_full_backward_hook(_tripled)),
        "all, pre": ("all modules", lambda: modules.register_module_full_backward_pre_hook(_tripled)),
    }

    def refused() -> None:
        for where, register in wheres.values():
            module[1]._is_full_backward_hook = None
            handle = register()
            with pytest.raises(NotImplementedError, check=coded("module.backward-hooks-do-not-run", where)):
                model(x)
            handle.remove()

    refused()
    model(x)
    refused()  # those that are added after the first call
    handle = model.register_backward_hook(_tripled)
    with pytest.raises(NotImplementedError, check=coded("module.non-full-backward-hook")):
        model(x)
    handle.remove()
    model._is_full_backward_hook = None

    # What the errors name instead.
    inputs = []
    for net in (reference, model):
        net.register_full_backward_hook(_tripled)
        net.register_full_backward_pre_hook(_tripled)
        net.get_parameter("2.weight").register_hook(lambda grad: 3 * grad)
        inputs.append(_batch(0).requires_grad_())
        out = net(inputs[-1])
        out.register_hook(lambda grad: 3 * grad)
        loss_of(out).backward()
    _close([inputs[1].grad, *_grads(model)], [inputs[0].grad, *_grads(reference)])


@on_ranks(2)
def test_a_step_without_reduced_gradients_warns() -> None:
    model = thunder.jit(nn.Linear(3, 2).double(), transforms=[fsdp()])
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        loss_of(model(_batch(0))).backward()
    with pytest.warns(UserWarning, match="AdamW.step: .*'weight'") as caught:
        optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__

    def closure() -> torch.Tensor:
        loss = loss_of(model(_batch(0)))
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.step(closure)  # reduces them
        optimizer.zero_grad()
        optimizer.step()  # there is nothing to reduce
