"""Operators that need special care: multi-input views, unknown and in-place operators, and those by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from coded import coded
from models import Model
from ranks import on_ranks
from scenario import Run, train_and_check_what_is_saved
from thunder.core.proxies import TensorProxy
from torch import nn


class Blocks(Model):
    """Blocks that read their weights through operators. There are several, so that slots are reused."""

    def __init__(self, *reads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(max(len(reads), 4)))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = torch.tanh(x @ self.reads[i % len(self.reads)](x, block.weight)) + x
        return x


VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "broadcast_tensors": lambda x, w: torch.broadcast_tensors(x, w)[1],
    "meshgrid": lambda x, w: torch.meshgrid(w[0], w[1], indexing="ij")[1],
    "atleast_3d": lambda x, w: torch.atleast_3d(x, w)[1].squeeze(2),
    "tensor_split": lambda x, w: torch.cat(list(reversed(torch.tensor_split(w, 2)))),
    "unbind": lambda x, w: torch.stack(w.unbind(1)),
    "expand_as": lambda x, w: w[0].expand_as(x),
    "swapaxes": lambda x, w: torch.swapaxes(w, 0, 1),
    "cartesian_prod": lambda x, w: torch.outer(torch.cartesian_prod(w[0]), w[1]),
}


@on_ranks()
def test_multi_input_views_of_parameters_train_correctly_and_are_not_saved() -> None:
    train_and_check_what_is_saved(Run(Blocks(*VIEWS.values()).double()), steps=2, batch=4)


class ReturnsViews(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        w = self.blocks[0].weight
        return super().forward(x), w, torch.broadcast_tensors(x, w)[1], torch.meshgrid(w[0], w[1], indexing="ij")


@on_ranks()
def test_returned_multi_input_views_of_parameters_are_cloned() -> None:
    Run(ReturnsViews(lambda x, w: w).double()).train(2, batch=4)


#
# Unknown operators
#


def opaque(w: torch.Tensor) -> torch.Tensor:
    return w.t()


@on_ranks()
def test_outputs_of_unknown_operators_are_copied_out_of_the_slot() -> None:
    executor = thunder.extend.OperatorExecutor("opaque")
    thunder.extend.register_executor(executor)
    meta = lambda w: TensorProxy(like=w, shape=tuple(reversed(w.shape)))  # noqa: E731
    symbol = executor.register_operator("opaque_t", meta=meta, fn=opaque, replaces=opaque)

    def grad(w: TensorProxy) -> TensorProxy:
        out = symbol(w)
        thunder.core.transforms.put_grad(w, thunder.torch.t(thunder.core.transforms.get_grad(out)))
        return out

    executor.register_implementation(symbol, symbol, grad_transform=grad)
    executors = [executor, *thunder.get_default_executors()]
    run = Run(Blocks(lambda x, w: opaque(w)).double(), jit_options={"executors": executors})
    train_and_check_what_is_saved(run, steps=2)


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("which of its inputs it returns a view of cannot be observed")


def cleared(x: torch.Tensor) -> torch.Tensor:
    return x.zero_().clone()


@on_ranks()
def test_what_an_unknown_operator_may_have_returned_is_not_changed_through_an_earlier_view() -> None:
    executor = thunder.extend.OperatorExecutor("mixed")
    thunder.extend.register_executor(executor)
    for function, meta in ((mixed, lambda x, w: TensorProxy(like=w)), (cleared, lambda x: TensorProxy(like=x))):
        executor.register_operator(f"{function.__name__}_of", meta=meta, fn=function, replaces=function)

    class Clears(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view = x[1:]
            return mixed(x, self.blocks[0].weight).sum() + cleared(view).sum()

    jitted = thunder.jit(Clears(), transforms=[fsdp()], executors=[executor, *thunder.get_default_executors()])
    with pytest.raises(NotImplementedError, check=coded("module.changes-possible-view-in-place", "cleared", "mixed")):
        jitted(torch.ones(4, 4))


#
# In-place operators
#


class Writes(Model):
    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("buf", torch.zeros(4, 4))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.write(self)
        return y


REFUSED: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda m: m.a.weight.detach().copy_(m.buf),
    "mul_ of a view": lambda m: m.a.weight.detach().view(-1).mul_(2),
    "add_ of a row": lambda m: m.a.weight.detach()[0].add_(1),
    "add_ of a diagonal": lambda m: m.a.weight.detach().diagonal().add_(1),
    "add_ of a diagonal's part": lambda m: m.a.weight.detach().t().diagonal().unsqueeze(0).add_(1),
    "add_ of a diagonal of a broadcast": lambda m: (
        torch.broadcast_tensors(m.a.weight.detach(), m.buf)[0].diagonal().add_(1)
    ),
    "add_ of a broadcast": lambda m: torch.broadcast_tensors(m.a.weight.detach(), m.buf)[0].add_(1),
    "setitem": lambda m: m.a.weight.detach().__setitem__(0, 1.0),
}


@on_ranks()
def test_parameters_may_be_copied_to_buffers_but_not_written_in_place() -> None:
    run = Run(Writes(lambda m: m.buf.copy_(m.a.weight.detach())).double())
    run.train(2)
    for name, write in REFUSED.items():
        jitted = thunder.jit(Writes(write), transforms=[fsdp(init=tfs.Init(broadcast_from=0))])
        with pytest.raises(NotImplementedError) as raised:
            jitted(torch.ones(3, 4))
        assert coded("module.in-place-change-of-parameter", "'a.weight'")(raised.value), name
    module = Writes(lambda m: m.a.weight.add_(1.0)).requires_grad_(False)
    before = module.a.weight.clone()
    jitted = thunder.jit(module, transforms=[fsdp(init=tfs.Init(broadcast_from=0, ignored_params=["a.weight"]))])
    for calls in (1, 2):
        jitted(torch.ones(3, 4))
        torch.testing.assert_close(module.a.weight, before + calls)


#
# Operators by position, such as ``as_strided``: they read the same elements as in the unsharded model
#


class Block(nn.Linear):
    """A block with two matrices, the second of which is not at the start of the slot, and an operator that reads them."""

    def __init__(self, read: Callable[..., Any], make: Callable[[], torch.Tensor] | None) -> None:
        super().__init__(4, 4, bias=False, dtype=torch.float64)
        self.second = nn.Parameter(torch.randn(4, 5, dtype=torch.float64) if make is None else make())
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.read(self.second, self.weight, x)
        # Two dimensions, because Thunder cannot expand the gradient of a 0-dim value.
        return torch.tanh(super().forward(x)) + (read + 0.1 * read * read).sum().reshape(1, 1)


class Positions(Model):
    """A block for each operator."""

    def __init__(self, *reads: Callable[..., Any], make: Callable[[], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(read, make) for read in reads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


READS: dict[str, Callable[..., Any]] = {
    "as_strided": lambda p, q, x: p.as_strided((2, 3), (5, 1), 6),
    "as_strided of rows": lambda p, q, x: p[2:].as_strided((2, 2), (5, 1), 1),
    "as_strided of rows without offset": lambda p, q, x: p[2:].as_strided((2, 2), (5, 1)),
    "as_strided of a transposed parameter": lambda p, q, x: p.t().as_strided((2, 2), (1, 5), 3),
    "as_strided of a multi-input view": lambda p, q, x: torch.broadcast_tensors(p[1, :4], q)[0].as_strided(
        (3,), (1,), 2
    ),
    "as_strided_scatter": lambda p, q, x: p[1:].as_strided_scatter(q[:2, :2], (2, 2), (5, 1), 6),
    "as_strided_scatter into an activation": lambda p, q, x: x.as_strided_scatter(p[:2, :2], (2, 2), (4, 1), 5),
    "slice_scatter": lambda p, q, x: torch.slice_scatter(p, p[:2], 0, 1, 3),
}


@on_ranks()
def test_operators_by_position_train_like_the_unsharded_model() -> None:
    Run(Positions(*READS.values())).train(2)


@on_ranks()
def test_an_operator_that_reads_beyond_its_parameter_fails_as_in_the_unsharded_model() -> None:
    model = Positions(lambda p, q, x: p.as_strided((2, 25), (1, 1)))
    jitted = thunder.jit(model, transforms=[fsdp()])
    with pytest.raises(RuntimeError, match="out of bounds for storage of size"):
        jitted(torch.ones(3, 4, dtype=torch.float64))


#
# Parameters that were not contiguous, or not at the start of their storage, before sharding
#

STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(5, 4, dtype=torch.float64).t(),
    "second half": lambda: torch.randn(8, 5, dtype=torch.float64)[4:],
    "every other column": lambda: torch.randn(4, 10, dtype=torch.float64)[:, ::2],
}


@on_ranks()
def test_operators_by_position_are_refused_if_sharding_has_changed_the_positions() -> None:
    for make in STRIDED.values():
        read = READS["as_strided of rows without offset" if make is STRIDED["second half"] else "as_strided"]
        jitted = thunder.jit(Positions(read, make=make), transforms=[fsdp(init=tfs.Init(broadcast_from=0))])
        refusal = coded("module.addresses-parameter-by-position", "as_strided", "blocks.0.second")
        with pytest.raises(ValueError, check=refusal):
            jitted(torch.ones(3, 4, dtype=torch.float64))
    Run(Positions(lambda p, q, x: p[1:].t(), make=STRIDED["transposed"])).train(2)

    copied = Positions(lambda p, q, x: torch.broadcast_tensors(p[1, :4], x[:1])[0].as_strided((3,), (1,), 2))
    jitted = thunder.jit(copied, transforms=[fsdp(init=tfs.Init(broadcast_from=0))])
    refusal = coded("module.addresses-possible-view-by-position", "broadcast_tensors")
    with pytest.raises(NotImplementedError, check=refusal):
        jitted(torch.ones(3, 4, dtype=torch.float64))


EAGER_READS = READS | {
    "storage_offset": lambda p, q, x: x * p[1:].storage_offset(),
    "stride": lambda p, q, x: x * p.stride(0),
    "torch.as_strided": lambda p, q, x: torch.as_strided(p, (2, 2), (5, 1), 6),
    "as_strided_copy": lambda p, q, x: torch.as_strided_copy(p[1:], (2, 2), (5, 1), 6),
    "set_": lambda p, q, x: torch.empty(0, dtype=p.dtype).set_(p.untyped_storage(), 6, (2, 2), (5, 1)),
}


RELATIVE = ("storage_offset", "stride", "as_strided of rows without offset")
"""Operators that read only elements of the parameter itself, for parameters that do not fill their storage."""


@on_ranks()
def test_eager_parameters_have_the_positions_and_strides_of_the_unsharded_model() -> None:
    transposed, second_half, _ = STRIDED.values()
    for make, names in ((None, EAGER_READS), (transposed, EAGER_READS), (second_half, RELATIVE)):
        for name in names:
            if make is not None and name == "as_strided_scatter":
                continue  # torch itself refuses it for other strides
            read = EAGER_READS[name]
            model = Positions(read, make=make)
            inputs = model.inputs(torch.Generator().manual_seed(1))
            with torch.no_grad():
                expected = model(*inputs)
            with tfs.eager(thunder.jit(model, transforms=[fsdp()])) as module:
                assert torch.equal(module(*inputs), expected), name
