"""The inputs and flags that traces are compiled for, as their prologue checks them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .effects import effects

_VALUE_CHECKS = frozenset({PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE, PrimIDs.CHECK_STRING_VALUE, PrimIDs.CHECK_NONE})
_SHOWN = 8
"""How many inputs, and how many flags, a description lists at most."""


class Call(NamedTuple):
    """A description of the calls for which a set of traces is compiled.

    Attributes:
        inputs: dtypes, shapes and values of the arguments.
        flags: flags of the module, and global modes.
    """

    inputs: Sequence[str]
    flags: Sequence[str]

    def __str__(self) -> str:
        return f"inputs {', '.join(_some(self.inputs)) or '(none)'} ({', '.join(self.flags)})"


NO_CALL = Call((), ())


def read_call(prologue: TraceCtx, *, no_sync: bool) -> Call:
    """Return the properties that a prologue checks: shapes and values of inputs, flags of the module, modes."""
    given: set[str] = set()  # proxies that stem from the arguments of the call
    module = ""
    attributes: dict[str, str] = {}
    training: set[str] = set()
    modes: dict[str, str] = {}
    inputs: list[str] = []
    flags: list[str] = []
    grads = autocast = False
    for bsym in prologue.bound_symbols:
        first = bsym.args[0] if bsym.args and isinstance(bsym.args[0], Proxy) else None
        out = bsym.output if isinstance(bsym.output, Proxy) else None
        if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL and out is not None:
            given.add(out.name)
        elif bsym.sym is prims.unpack_thunder_module and out is not None:
            module = out.name
        elif bsym.sym.id is PrimIDs.UNPACK_ATTR and first is not None and out is not None:
            if bsym.args[1] == "training":
                training.add(out.name)
            elif first.name == module:
                attributes[out.name] = bsym.args[1]
        elif bsym.sym.id is PrimIDs.UNPACK_GETITEM and first is not None and first.name.startswith("cache_info"):
            if out is not None:
                modes[out.name] = str(bsym.args[1])
        elif first is not None and first.name in given and not bsym.sym.name.startswith("check"):
            given.update(p.name for p in bsym.flat_proxy_outs)
        elif bsym.sym.id is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA and first is not None and first.name in given:
            _, shape, _, dtype, requires_grad = bsym.args
            inputs.append(f"{str(dtype).rpartition('.')[2]}{list(shape)}{' with gradient' * requires_grad}")
        elif bsym.sym.id in _VALUE_CHECKS and first is not None:
            value = bsym.args[1] if len(bsym.args) > 1 else None
            if first.name in given:
                inputs.append(repr(value))
            elif first.name in attributes and isinstance(value, (bool, str)):  # numbers are usually sizes
                flags.append(f"{attributes[first.name]}={value!r}")
            elif first.name in training and value:
                training.add("any")
            elif first.name in modes:
                grads |= modes[first.name] == "is_grad_enabled" and bool(value)
                autocast |= modes[first.name] == "is_autocast_enabled" and bool(value)
    words = ["gradients enabled" if grads else "no gradients"]
    if training:
        words.append("training" if "any" in training else "evaluating")
    words += ["no_sync"] * no_sync + ["autocast"] * autocast + [*_some(flags)]
    return Call(inputs, words)


def count_issues(bsyms: Iterable[BoundSymbol]) -> int:
    """Return the number of collectives, including gathers of resident buckets."""
    return sum(e.issues is not None and e.bucket is not None for e in map(effects, bsyms))


def _some(texts: Sequence[str]) -> Sequence[str]:
    return texts if len(texts) <= _SHOWN else [*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more"]
