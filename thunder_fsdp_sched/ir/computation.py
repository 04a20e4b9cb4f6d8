"""The two readings of a trace that ranks compare: its computation, as lines, and its actions, which issue and wait.

[Note: Equal computations]
Ranks shard one model, so they must compute the same on their inputs: the same operators with the same arguments, on the
same intermediate results. Only the inputs may differ. Some numbers in a trace depend on the inputs: Thunder derives
them from shapes (an offset, the divisor of a mean), or they were passed to the model. In the trace they look like any
other constant of the model. So there are two comparisons:

- Ranks whose inputs have the same shapes and values must have identical lines.
- Ranks whose inputs differ must have identical lines except for numbers that may stem from a size: integers other than
  dimensions, and floats that are an integer, its square root, or the reciprocal of either. Dimensions, other constants,
  flags, dtypes and data flow must still be equal.

Lines contain neither shapes nor anything that always differs between ranks: device indices, buffers and slots.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from numbers import Number
from types import EllipsisType
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, Proxy
from thunder.core.symbol import BoundSymbol, Symbol

from ..ranks.compare_programs import Computation
from ..ranks.messages import Action
from ..runtime.bucket import Bucket
from .statements import Statement

_DIMENSION = re.compile("dim|axis|axes|permutation")
"""Matches the names of operator parameters that are dimensions."""

_MAX_SIZE = 2.0**40
"""The largest float that is checked; every larger one counts as an integer."""


def computation_of(statements: Sequence[Statement], args: Iterable[Any], inputs: Sequence[str]) -> Computation:
    """Return the computation of a trace with these arguments on ``inputs``."""
    lines: list[str] = []
    comparable: list[str] = []
    trace_lines: list[str] = []
    numbers = itertools.count()
    known: dict[str, str] = defaultdict(lambda: f"%{next(numbers)}")  # names in lines, by names of proxies
    known.update({p.name: f"input_{i}" for i, p in enumerate(args) if isinstance(p, Proxy)})
    for statement in statements:
        bsym, e = statement.bsym, statement.effects
        if (
            statement.waits_for is not None
            and statement.issue is None
            and e.bucket is not None
            and bsym.output is not None
        ):
            kind = "" if e.unshards else "gradient of "
            # The order of parameters in a bucket is the same on all ranks.
            known.update({p.name: f"{kind}{q.name}" for p, q in zip(bsym.output, e.bucket.spec.params, strict=True)})
        exact, masked = [_line(bsym, known, number) for number in (str, _without_size)]
        if e.in_schedule and e.bucket is not None:
            trace_lines.append(f"{bsym.sym.name} {e.bucket.spec.name}")
        else:
            trace_lines.append(exact)
            lines.append(exact)
            comparable.append(masked)
    return Computation(inputs, lines, comparable, trace_lines)


def _line(bsym: BoundSymbol, known: dict[str, str], number: Callable[[Any], str]) -> str:
    """Return the line of ``bsym``.

    Args:
        known: names in lines by names of proxies; looking up a new one gives it the next number.
        number: formats a number that is no dimension.
    """
    if bsym.sym.is_fusion:  # its name does not depend on its content
        return "fusion of " + "; ".join(_line(sub, known, number) for sub in bsym.subsymbols)
    positional = zip(itertools.chain(_parameters(bsym.sym.meta), itertools.repeat("")), bsym.args, strict=False)
    arguments = itertools.chain(positional, sorted(bsym.kwargs.items()))
    texts = [_text(value, known, str if _DIMENSION.search(name) else number) for name, value in arguments]
    outputs = []
    for out in bsym.flat_proxy_outs:
        dtype = getattr(out, "dtype", None)
        outputs.append(f"{known[out.name]}: {_text(dtype, known, str)}" if dtype else known[out.name])
    returned = f" -> {', '.join(outputs)}" if outputs else ""
    return f"{bsym.sym.name}({', '.join(texts)}){returned}"


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
    return str(getattr(value, "text_to_compare", type(value).__qualname__))


def _without_size(number: Any) -> str:
    """Return the text of a number, or a placeholder for one that may stem from a size."""
    if isinstance(number, int):
        return "size"
    if not isinstance(number, float) or not math.isfinite(number) or number == 0:
        return str(number)
    size = abs(number) if abs(number) >= 1 else 1 / abs(number)
    may_be_size = any(abs(x - round(x)) <= 1e-12 * x or x > _MAX_SIZE for x in (size, size * size))
    return "size" if may_be_size else str(number)


def actions_of(statements: Sequence[Statement]) -> list[Action]:
    """Return the sequence of issues and waits of a trace, the input of ``deadlock.find_fault``.

    The line of a reduction names the parameters of the bucket that have no gradient in this trace. A rank that lacks a
    gradient returns none to autograd, whatever the others send for its rows, so ranks must lack the same.
    """
    actions: list[Action] = []
    issued: list[Action] = []
    hooks = 0
    for statement in statements:
        e, issue = statement.effects, statement.issue
        if statement.waits_for is not None:
            actions.append(issued[statement.waits_for.number]._replace(waits=True))
        if e.hook is not None and e.bucket is not None:
            # It may communicate on any group, so it counts as a collective of all ranks that share the bucket.
            bucket, hooks = e.bucket, hooks + 1
            ranks = bucket.ranks.all_ranks
            called = Action(
                f"all_reduce_hook {e.hook} {bucket.spec.name}", f"hook of ranks {ranks}", ranks, False, -hooks
            )
            actions += [called, called._replace(waits=True)]
        if issue is not None and e.bucket is not None and issue.group is not None:
            spec, group = e.bucket.spec, issue.group
            line = f"{issue.kind} {spec.name} {issue.nbytes} bytes {issue.dtype} {issue.sent_by}"
            line += "".join(f" {name}={mark}" for name, mark in issue.marks.items())
            if missing := [spec.params[index].name for index in e.missing_gradients]:
                line += f" without gradients of {', '.join(missing)}"
            issued.append(
                Action(line, group.name or group.description, tuple(group.global_ranks), False, statement.number)
            )
            actions.append(issued[-1])
    return actions
