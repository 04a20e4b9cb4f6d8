"""Operators that address a storage by position, such as ``as_strided``, read the same elements as in the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from profiles import mostly_zero3
from ranks import on_ranks
from scenario import Run
from torch import nn


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


class Positions(nn.Module):
    """A block for each operator."""

    def __init__(self, *reads: Callable[..., Any], make: Callable[[], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(read, make) for read in reads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(3, 4, generator=generator, dtype=torch.float64),)


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


@mostly_zero3
@on_ranks()
def test_operators_by_position_train_like_the_unsharded_model(strategy: str) -> None:
    Run(Positions(*READS.values()), sharding_strategy=strategy).train(2)


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
        for read in (READS["as_strided"], READS["as_strided of rows without offset"]):
            jitted = thunder.jit(Positions(read, make=make), transforms=[fsdp(broadcast_from=0)])
            with pytest.raises(ValueError, match=r"as_strided addresses parameter 'blocks\.0\.second' by position"):
                jitted(torch.ones(3, 4, dtype=torch.float64))
        Run(Positions(lambda p, q, x: p[1:].t(), make=make)).train(2)

    copied = Positions(lambda p, q, x: torch.broadcast_tensors(p[1, :4], x[:1])[0].as_strided((3,), (1,), 2))
    jitted = thunder.jit(copied, transforms=[fsdp(broadcast_from=0)])
    with pytest.raises(NotImplementedError, match="that broadcast_tensors may have returned as a view of a parameter"):
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
