"""Example calls of every operator that Thunder registers.

For operators that Thunder implements itself, its OpInfos provide arguments. The others, about 500, have no OpInfo: a few
common forms of arguments are tried on small tensors, and those that torch accepts are used.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import thunder_fsdp_sched  # before thunder  # noqa: F401

import thunder.torch as ltorch
import torch
from profiles import LONG
from thunder.core.prims import OpTags
from thunder.core.symbol import Symbol
from torch.utils._pytree import tree_map_only

_NO_OPERATORS = ("autocast", "grad_enabled", "checkpoint", "autograd", "seed", "higher_order", "is_complex", "_assert")
_PER_SYMBOL = 2 if LONG else 1


class Call(NamedTuple):
    """A torch function, arguments that it accepts, and the symbol that Thunder traces for it."""

    function: Callable[..., Any]
    symbol: Symbol
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def show(x: Any) -> str:
            return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

        given = [show(a) for a in self.args] + [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        return f"{self.symbol.id}({', '.join(given)})"


def calls() -> Iterator[Call]:
    """Yield a few accepted calls for each symbol, by one of the functions that map to it."""
    found: set[Symbol] = set()
    for function, symbol in list(ltorch._torch_to_thunder_function_map.items()):
        if not isinstance(symbol, Symbol) or not callable(function) or symbol in found:
            continue
        name = f"{symbol.id} {symbol.name}"
        if any(n in name for n in _NO_OPERATORS) or OpTags.CTX_MANAGER_ENTER_EXIT_OP in (symbol.tags or ()):
            continue
        accepted = (number for number, arguments in enumerate(_arguments()) if _accepts(function, *arguments))
        for number in itertools.islice(accepted, _PER_SYMBOL):
            found.add(symbol)
            yield Call(function, symbol, *next(itertools.islice(_arguments(), number, None)))
    yield from _calls_of_opinfos()


def _calls_of_opinfos() -> Iterator[Call]:
    from thunder.tests.opinfos import opinfos

    for info in opinfos:
        if not isinstance(info.op, Symbol) or info.torch_reference is None:
            continue
        try:
            samples = list(itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), _PER_SYMBOL))
        except Exception:
            continue
        for sample in samples:
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, (sample.args, sample.kwargs))
            if _accepts(info.torch_reference, args, kwargs):
                yield Call(info.torch_reference, info.op, sample.args, sample.kwargs)


def _arguments() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    matrix = torch.linspace(0.1, 0.9, 16).view(4, 4)
    index, mask = torch.tensor([0, 2, 1, 3]), torch.eye(4, dtype=torch.bool)
    none: dict[str, Any] = {}
    for training in ({"training": True}, {"train": True}):
        for t in (matrix, torch.rand(2, 4, 4) + 0.1, torch.rand(2, 4, 4, 4) + 0.1, torch.rand(2, 3, 4, 4, 4) + 0.1):
            yield (t,), training
            yield (t, 0.5), training
    yield (matrix,), {"inplace": True}
    yield (matrix,), none
    yield (matrix, matrix), none
    yield ([matrix, matrix],), none
    yield (matrix, matrix, matrix), none
    yield ("ij->ji", matrix), none
    yield ("ij->ij", matrix), none
    for numbers in (
        *((0,), (1,), (2,), (0, 1), (0, 10), (0, 0, 2), (0, 1, 2)),
        *(((1, 0),), ((4, 4),), (4, 4), ([2, 2],), (0.5,)),
    ):
        yield (matrix, *numbers), none
    yield (matrix, 0.5, True), none
    yield (matrix, 0.1, 0.3, True), none
    yield (matrix, index), none
    yield (matrix, 0, index), none
    yield (matrix, 0, index, matrix), none
    yield (matrix, 0, index.view(1, 4), matrix), none
    yield (matrix, mask), none
    yield (matrix, mask, 0.5), none
    yield (matrix, mask, matrix), none
    yield (mask, matrix, matrix), none
    yield (matrix, (index,), matrix), none
    yield (index, matrix), none
    yield (index, index), none
    yield (matrix, torch.float64), none
    yield (matrix, torch.float32), none
    for shape in ((4,), (2, 4, 4), (2, 4, 4, 4), (2, 3, 4, 4, 4)):
        t = torch.rand(shape) + 0.1
        yield (t,), none
        yield (t, t), none
        yield (t, t, t), none
        yield (t, 2), none
        yield (t, (2,) * max(t.ndim - 2, 1)), none
        yield (t, 2, 2), none
        yield (t, torch.rand(4, *shape[1:])), none
    yield (torch.rand(4, 4, dtype=torch.complex64),), none
    yield (torch.rand(4, 2),), none


def _accepts(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function takes the arguments, which it may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*args, **kwargs)
        except Exception:
            return False
    return True
