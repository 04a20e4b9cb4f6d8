"""The calls that traces are compiled for, as their prologues check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.trace import TraceCtx

from .inspection import names

_VALUE_CHECKS = frozenset({PrimIDs.CHECK_NUMBER_TYPE_AND_VALUE, PrimIDs.CHECK_STRING_VALUE, PrimIDs.CHECK_NONE})
_SHOWN = 8
"""How many inputs, and how many flags, a description lists at most."""


class CallSignature(NamedTuple):
    """A description of the calls for which a set of traces is compiled.

    Attributes:
        inputs: dtypes, shapes and values of the arguments.
        flags: flags of the module, and global modes.
    """

    inputs: Sequence[str]
    flags: Sequence[str]

    def __str__(self) -> str:
        return f"inputs {', '.join(_some(self.inputs)) or '(none)'} ({', '.join(self.flags)})"


NO_CALL = CallSignature((), ())


def read_call(prologue: TraceCtx, *, no_sync: bool) -> CallSignature:
    """Return the properties that a prologue checks: shapes and values of inputs, flags of the module, modes."""
    origins: dict[str, tuple[str, str]] = {}  # for a proxy, its kind of source, and the name of an attribute or mode
    inputs: list[str] = []
    flags: list[str] = []
    enabled: set[str] = set()
    for bsym in prologue.bound_symbols:
        of = bsym.args[0].name if bsym.args and isinstance(bsym.args[0], Proxy) else ""
        kind, name = origins.get(of, ("", ""))
        value = bsym.args[1] if len(bsym.args) > 1 else None
        origin = None
        if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL:
            origin = "argument", ""
        elif bsym.sym.id is PrimIDs.UNPACK_THUNDER_MODULE:
            origin = "module", ""
        elif bsym.sym.id is PrimIDs.UNPACK_ATTR:
            if value == "training":
                origin = "training", "training"
            elif kind == "module":
                origin = "attribute", str(value)
        elif bsym.sym.id is PrimIDs.UNPACK_GETITEM and of.startswith("cache_info"):
            origin = "mode", str(value)
        elif kind == "argument" and not bsym.sym.name.startswith("check"):
            origin = "argument", ""
        elif bsym.sym.id is PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA and kind == "argument":
            _, shape, _, dtype, requires_grad = bsym.args
            inputs.append(f"{str(dtype).rpartition('.')[2]}{list(shape)}{' with gradient' * requires_grad}")
        elif bsym.sym.id in _VALUE_CHECKS:
            if kind == "argument":
                inputs.append(repr(value))
            elif kind == "attribute" and isinstance(value, (bool, str)):  # numbers are usually sizes
                flags.append(f"{name}={value!r}")
            elif value:
                enabled.add(name)
        if origin is not None:
            origins.update(dict.fromkeys(names(bsym.flat_proxy_outs), origin))
    words = ["gradients enabled" if "is_grad_enabled" in enabled else "no gradients"]
    if any(kind == "training" for kind, _ in origins.values()):
        words.append("training" if "training" in enabled else "evaluating")
    words += ["no_sync"] * no_sync + ["autocast"] * ("is_autocast_enabled" in enabled) + [*_some(flags)]
    return CallSignature(inputs, words)


def _some(texts: Sequence[str]) -> Sequence[str]:
    return texts if len(texts) <= _SHOWN else [*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more"]
