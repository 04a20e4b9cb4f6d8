"""torch's own samples of its operators: values and gradients are those of eager mode, or there is an error."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from models import Calling
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("expecttest", reason="torch's samples need it")
from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.long]

OTHER = {"repeat": "results without elements have gradients of zeros, which are None here"}
"""Operators with other gradients: zeros and None differ for optimizers with weight decay."""


def applied(operator: Callable[..., Any], kwargs: dict[str, Any]) -> nn.Module:
    """Return a module that scales the first operand of an operator, one or several tensors, and calls it."""

    def forward(self: Any, first: Any, args: Any) -> Any:
        is_tensor = isinstance(first, torch.Tensor)
        scaled = first * self.scale if is_tensor else [t * self.scale if t.is_floating_point() else t for t in first]
        return operator(scaled, *args, **kwargs)

    return Calling(forward, scale=nn.Parameter(torch.ones((), dtype=torch.float64)))


def _samples(info: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Return first operands of floating point, with the other operands."""
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float64, requires_grad=False), 0, 40, 13):
        first = [sample.input] if isinstance(sample.input, torch.Tensor) else sample.input
        if isinstance(first, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in first):
            if any(t.is_floating_point() for t in first):
                yield sample.input, sample.args, sample.kwargs


def _run(model: Any, first: Any, args: Any) -> list[Any]:
    """Return results, and the gradients of the operands and of the parameter."""
    first = tree_map(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), first)
    args = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, args)
    outputs = [t for t in tree_leaves(model(first, args)) if isinstance(t, torch.Tensor)]
    recorded = [t for t in outputs if t.requires_grad]
    if recorded:
        torch.autograd.backward(recorded, [torch.full_like(t, 0.5) for t in recorded])
    grads = [t.grad for t in tree_leaves(first)]
    parameters = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return [*(t.detach() for t in outputs), *(grads + parameters if recorded else ())]


@pytest.mark.parametrize("strict", [True, False], ids=["traced", "leaves"])
@pytest.mark.filterwarnings("ignore")
def test_values_and_gradients_are_those_of_eager_mode(strict: bool) -> None:
    right, wrong = 0, []
    for info in op_db:
        if info.name in OTHER:
            continue
        for first, args, kwargs in _samples(info):
            module = applied(info.op, kwargs)
            try:
                torch.manual_seed(0)
                expected = _run(copy.deepcopy(module), first, args)
            except Exception:  # an operator that eager mode refuses so
                continue
            try:
                torch.manual_seed(0)
                leaf_modules: Any = () if strict else ("auto",)
                found = _run(thunder.jit(module, transforms=[fsdp(leaf_modules=leaf_modules)]), first, args)
            except Exception:  # an error in place of a result is as promised
                continue
            if len(found) > len(expected):  # torch has no gradient of the operator
                continue
            found += [None] * (len(expected) - len(found))  # of a result without elements, that needs no gradient
            if all(map(_is_close, found, expected)):
                right += 1
            else:
                wrong.append(f"{info.name}({first}, {args}, {kwargs}): {found} for {expected}"[:400])
    assert not wrong, "\n".join(wrong)
    assert right > 650


def _is_close(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if expected is None:  # torch leaves some gradients of zeros out, as of a norm of order 0
        return found is None or not found.any()
    if found is None:
        return False
    alike = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return alike and torch.allclose(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True)
