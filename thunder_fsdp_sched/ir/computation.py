"""The computation of a trace, as lines that ranks compare.

[Note: Equal computations]
Ranks shard one model, so they must compute the same on their inputs: the same operators with the same arguments, on the
same intermediate results. Only the inputs may differ. Some numbers in a trace depend on the inputs: Thunder derives
them from shapes (an offset, the divisor of a mean), or they were passed to the model. In the trace they look like any
other constant of the model. So there are two comparisons:

- Ranks whose inputs have the same shapes and values must have identical lines.
- Ranks whose inputs differ must have identical lines except for numbers that may stem from a size: integers other than
  dimensions, and floats that are an integer, its square root, or the reciprocal of either. Dimensions, other constants,
  flags, dtypes and data flow must still be equal.

Ranks must offload the same values, but may copy them at different positions, because these depend on sizes. So the
copies have no lines, and in the lines of others a copy is named after the value.

Lines contain neither shapes nor anything that always differs between ranks: device indices, buffers and slots.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from numbers import Number
from types import EllipsisType
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx

from ..ranks.control import Computation
from ..runtime.bucket import Bucket
from .effects import Effects, effects
from .inspection import outs_of, statements

_DIMENSIONS = frozenset(
    {
        "dim",
        "dims",
        "dim0",
        "dim1",
        "dim_0",
        "dim_1",
        "axis",
        "axes",
        "start_dim",
        "end_dim",
        "permutation",
        "batch_dim",
    }
)
"""Names of operator parameters whose numbers are dimensions."""

_SIZE = "size"
"""The placeholder for a number that may stem from a size."""

_MAX_SIZE = 2.0**40
"""The largest float that is checked; every larger one counts as an integer."""


def computation_of(trace: TraceCtx, inputs: Sequence[str]) -> Computation:
    """Return the computation of ``trace`` on ``inputs``."""
    lines: list[str] = []
    comparable: list[str] = []
    trace_lines: list[str] = []
    names = _Names({p.name: f"input_{i}" for i, p in enumerate(trace.args or ()) if isinstance(p, Proxy)})
    for bsym in statements(trace):
        e = effects(bsym)
        if e.bucket is None and (e.issues is not None or e.waits is not None):  # a copy to or from host memory
            _name_copy(bsym, e, names)
            continue
        if e.waits is not None and e.issues is None and e.bucket is not None and bsym.output is not None:
            kind = "" if e.unshards else "gradient of "
            # The order of parameters in a bucket is the same on all ranks.
            names.update({p.name: f"{kind}{q.name}" for p, q in zip(bsym.output, e.bucket.spec.params, strict=True)})
        exact, masked = [_line(bsym, names, number) for number in (str, _without_size)]
        if e.in_schedule and e.bucket is not None:
            trace_lines.append(f"{bsym.sym.name} {e.bucket.spec.name}")
        else:
            trace_lines.append(exact)
            lines.append(exact)
            comparable.append(masked)
    return Computation(inputs, lines, comparable, trace_lines)


class _Names(dict[str, str]):
    """The names of proxies in lines, the same on all ranks."""

    def __init__(self, inputs: dict[str, str]) -> None:
        super().__init__(inputs)
        self._numbered = 0

    def of_output(self, proxy: Proxy) -> str:
        """Return the name of an output, the next number unless it has a name already."""
        if proxy.name not in self:
            self[proxy.name] = f"%{self._numbered}"
            self._numbered += 1
        return self[proxy.name]


def _name_copy(bsym: BoundSymbol, e: Effects, names: _Names) -> None:
    """Name the result of a copy to host memory or back after the value that is copied."""
    source = names[bsym.args[0].name]
    to_host = e.issues is not None and not e.reads_host
    names.update({out: f"host copy of {source}" if to_host else source for out in outs_of(bsym)})


def _line(bsym: BoundSymbol, names: _Names, number: Callable[[Any], str]) -> str:
    """Return the line of ``bsym``.

    Args:
        number: formats a number that is no dimension.
    """
    if bsym.sym.is_fusion:  # its name does not depend on its content
        return "fusion of " + "; ".join(_line(sub, names, number) for sub in bsym.subsymbols)
    texts = [_text(value, names, str if name in _DIMENSIONS else number) for name, value in _bound(bsym)]
    outputs = []
    for out in bsym.flat_proxy_outs:
        name = names.of_output(out)
        outputs.append(f"{name}: {_text(dtype, names, str)}" if (dtype := getattr(out, "dtype", None)) else name)
    returned = f" -> {', '.join(outputs)}" if outputs else ""
    return f"{bsym.sym.name}({', '.join(texts)}){returned}"


def _bound(bsym: BoundSymbol) -> list[tuple[str, Any]]:
    """Return the arguments with the names of their parameters; unknown names are empty."""
    names = _parameters(bsym.sym.meta)
    positional = [(names[i] if i < len(names) else "", value) for i, value in enumerate(bsym.args)]
    return [*positional, *sorted(bsym.kwargs.items())]


@lru_cache(maxsize=4096)
def _parameters(meta: Callable[..., Any] | None) -> tuple[str, ...]:
    while isinstance(meta, Symbol):  # an executor's symbol that wraps another one
        meta = meta.meta
    try:
        parameters = inspect.signature(meta).parameters.values() if meta is not None else ()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _text(value: Any, names: Mapping[str, str], number: Callable[[Any], str]) -> str:
    """Return a text for ``value`` that is the same on all ranks with an equivalent value.

    Args:
        names: the names of proxies.
        number: formats a number.
    """
    match value:
        case Proxy() if value.name in names:
            return names[value.name]
        case NumberProxy() if value.value is not None:
            return _text(value.value, names, number)
        case Proxy():
            return "?"
        case None | bool() | str() | EllipsisType() | Enum() | torch.memory_format():
            return repr(value)
        case torch.dtype() | dtypes.dtype():
            return str(value).rpartition(".")[2]
        case torch.device() | devices.Device():
            return str(value).partition(":")[0]
        case Number():
            return number(value)
        case list() | tuple() | set() | frozenset() | torch.Size():
            texts = [_text(v, names, number) for v in value]
            return f"({', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)})"
        case dict():
            return "{" + ", ".join(f"{k}: {_text(v, names, number)}" for k, v in value.items()) + "}"
        case slice():
            return f"slice{_text((value.start, value.stop, value.step), names, number)}"
        case Bucket():
            return value.spec.name
        case Symbol():
            return value.name
        case type() | Callable():
            return str(getattr(value, "__qualname__", type(value).__qualname__))
    return type(value).__qualname__


def _without_size(number: Any) -> str:
    return _SIZE if _may_be_size(number) else str(number)


def _may_be_size(number: Any) -> bool:
    if isinstance(number, int):
        return True
    if not isinstance(number, float) or not math.isfinite(number) or number == 0:
        return False
    size = abs(number) if abs(number) >= 1 else 1 / abs(number)
    return any(abs(x - round(x)) <= 1e-12 * x or x > _MAX_SIZE for x in (size, size * size))
