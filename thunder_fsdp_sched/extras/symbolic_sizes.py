"""Sizes of inputs that a trace with symbolic values has fixed.

[Note: Symbolic sizes]
With ``cache="symbolic values"`` a size is a proxy, and a trace runs for other sizes, too. But a program, or Thunder,
may branch on the value of a size, and the trace contains only the branch that was taken. Thunder checks that for
numbers among the arguments, but not for sizes. So here the value of a size is checked

- if Python code gets it: a condition, ``range``, ``int``, a comparison of tuples, a slice of a list, a key;
- if such a value is computed from it, by operators on numbers;
- or if an operator reads it that is not known to compute with proxies alone (``_COMPUTES_WITH_PROXIES``), such as
  ``chunk``.

All other sizes are checked only for being 1 or not, because Thunder broadcasts sizes of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thunder.core.interpreter import is_opaque, unwrap
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..capture.paths import ATTRIBUTE, ITEM, Path
from ..ir.inspection import defined_by, nested
from ..private_thunder import shape_of
from ..runtime.traced_inputs import EQUAL, NOT, Check

_COMPARED: dict[str, Callable[[int], Iterable[int]]] = {
    **dict.fromkeys(("COMPARE_OP", "CONTAINS_OP", "IS_OP"), lambda _: (-1, -2)),
    "BUILD_MAP": lambda number: range(-2 * number, 0, 2),
    "BUILD_SET": lambda number: range(-number, 0),
    "MAP_ADD": lambda _: (-2,),
    "SET_ADD": lambda _: (-1,),
}
"""Instructions that compare values, or keys by their hashes; their positions on the stack, by the argument."""

_GETS_NO_VALUES = frozenset({slice.__new__, object.__init__})
"""Functions of C that create a slice, and keep its bounds as they are. Thunder calls them for ``x[:n]`` on Python 3.12."""

_COMPARING = frozenset(
    (
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__contains__",
        "index",
        "count",
        "max",
        "min",
        "sorted",
    )
)


class Sizes:
    """The sizes of input tensors, and those whose values the program has read."""

    def __init__(self) -> None:
        self._paths: dict[str, list[tuple[Path, Any]]] = {}  # of each size, by name, with its value
        self._numbers: list[tuple[Path, NumberProxy]] = []  # others that the program reads
        self._got: dict[str, NumberProxy] = {}

    def add_number(self, path: Path, number: NumberProxy) -> None:
        """Record a number that the program reads from its arguments or its module."""
        self._numbers.append((path, number))

    def add(self, path: Path, tensor: TensorProxy) -> None:
        """Record an input tensor."""
        for dim, size in enumerate(shape_of(tensor)):
            if isinstance(size, NumberProxy):
                paths = self._paths.setdefault(size.name, [])
                paths.append(((*path, (ATTRIBUTE, "shape"), (ITEM, dim)), size.value))

    def note_call(self, function: Any, is_interpreted: bool, args: Sequence[Any]) -> None:
        """Record the arguments whose values a function of C gets.

        Args:
            is_interpreted: whether it has a lookaside. Lookasides of containers get only the values of slices and keys.
        """
        if not is_opaque(function) or function in _GETS_NO_VALUES:
            return
        owner = getattr(function, "__objclass__", getattr(function, "__self__", None))
        inside = getattr(function, "__name__", "") in _COMPARING or owner is set or owner is frozenset
        for position, value in enumerate(map(unwrap, args)):
            if isinstance(value, slice):
                self._note((value.start, value.stop, value.step), inside=True)
            elif owner is dict and position == 1:
                self._note(value, inside=True)
            elif not is_interpreted:
                self._note(value, inside=inside)

    def interpret(self, interpret: Callable[..., Any], inst: Any, /, **state: Any) -> Any:
        """Record the operands that an instruction compares."""
        for position in _COMPARED[inst.opname](inst.arg) if inst.opname in _COMPARED else ():
            operand = unwrap(state["stack"].getitem_wrapped(position))
            if not isinstance(operand, NumberProxy) or inst.opname != "COMPARE_OP":
                self._note(operand, inside=True)
        return interpret(inst, **state)

    def _note(self, value: Any, *, inside: bool) -> None:
        if isinstance(value, NumberProxy):
            self._got[value.name] = value
        elif inside and isinstance(value, (tuple, list, set, frozenset)):
            for item in value:
                self._note(item, inside=True)

    def checks(self, bsyms: Iterable[BoundSymbol]) -> Mapping[Path, Check]:
        """Return the checks of sizes, by path, for a traced program."""
        made_by: dict[str, BoundSymbol] = {}
        got = dict(self._got)
        for bsym in nested(bsyms):
            for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
                if isinstance(proxy, NumberProxy) and proxy.is_static_constrained():
                    got[proxy.name] = proxy
            if isinstance(bsym.sym.id, PrimIDs):
                got.update((size.name, size) for size in _sizes_got_by(bsym, made_by) if isinstance(size, NumberProxy))
            for out in defined_by(bsym):
                made_by.setdefault(out.name, bsym)
        fixed: set[str] = set()
        front = list(got)
        while front:
            name = front.pop()
            if name not in fixed:
                fixed.add(name)
                bsym = made_by.get(name) if name not in self._paths else None
                front += [p.name for p in bsym.flat_proxy_args if isinstance(p, NumberProxy)] if bsym else []
        checks: dict[Path, Check] = {}
        for name, paths in self._paths.items():
            for path, value in paths:
                checks[path] = (EQUAL, value) if name in fixed or value == 1 else (NOT, 1)
        for path, number in self._numbers:
            if number.name in fixed or number.is_static_constrained():
                checks[path] = EQUAL, number.value
        return checks


# fmt: off
_COMPUTES_WITH_PROXIES = frozenset({
    PrimIDs.ABS, PrimIDs.ACOS, PrimIDs.ACOSH, PrimIDs.ADD, PrimIDs.AMAX, PrimIDs.AMIN, PrimIDs.ARGMAX, PrimIDs.ARGMIN,
    PrimIDs.ASIN, PrimIDs.ASINH, PrimIDs.ATAN, PrimIDs.ATAN2, PrimIDs.ATANH, PrimIDs.BITWISE_AND, PrimIDs.BITWISE_NOT,
    PrimIDs.BITWISE_OR, PrimIDs.BITWISE_XOR, PrimIDs.BROADCAST_IN_DIM, PrimIDs.CEIL, PrimIDs.CLONE, PrimIDs.COMMENT,
    PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.COS, PrimIDs.COSH, PrimIDs.DEVICE_PUT, PrimIDs.DIV, PrimIDs.EMBEDDING,
    PrimIDs.EQ, PrimIDs.ERF, PrimIDs.ERFC, PrimIDs.EXP, PrimIDs.EXP2, PrimIDs.EXPM1, PrimIDs.FLOOR, PrimIDs.FMOD,
    PrimIDs.FULL, PrimIDs.GE, PrimIDs.GT, PrimIDs.IOTA, PrimIDs.ISFINITE, PrimIDs.LE, PrimIDs.LINEAR, PrimIDs.LOG,
    PrimIDs.LOG10, PrimIDs.LOG1P, PrimIDs.LOG2, PrimIDs.LT, PrimIDs.MATMUL, PrimIDs.MAXIMUM, PrimIDs.MINIMUM,
    PrimIDs.MUL, PrimIDs.NE, PrimIDs.NEG, PrimIDs.POW, PrimIDs.RECIPROCAL, PrimIDs.REMAINDER, PrimIDs.RESHAPE,
    PrimIDs.RETURN, PrimIDs.ROUND, PrimIDs.RSQRT, PrimIDs.SHALLOW_COPY, PrimIDs.SHAPE, PrimIDs.SIGN, PrimIDs.SIN,
    PrimIDs.SINH, PrimIDs.SQRT, PrimIDs.STRIDE_ORDER, PrimIDs.SUB, PrimIDs.SUM, PrimIDs.TAKE, PrimIDs.TAKE_ALONG_AXIS,
    PrimIDs.TAN, PrimIDs.TANH, PrimIDs.TRANSPOSE, PrimIDs.TRUNC, PrimIDs.UNIFORM, PrimIDs.UNPACK_TRIVIAL, PrimIDs.VAR,
    PrimIDs.VAR_MEAN, PrimIDs.WHERE,
})
# fmt: on
"""Prims whose results, and whose gradients, have the sizes of their arguments as proxies. (A reshape to another number of
elements is an error.)"""


def _sizes_got_by(prim: BoundSymbol, made_by: Mapping[str, BoundSymbol]) -> Sequence[Any]:
    """Return the sizes whose values, not only proxies, may influence the result of a prim or its gradient."""
    tensors = [p for p in (*prim.flat_proxy_args, *prim.flat_proxy_outs) if isinstance(p, TensorProxy)]
    if prim.sym.id in _COMPUTES_WITH_PROXIES or not tensors:
        return ()
    sizes = shape_of(tensors[0])
    if prim.sym.id is PrimIDs.SLICE:
        source, begin, end = prim.args[:3]
        is_constant = source.name not in made_by and not source.requires_grad  # others get a gradient of a fixed size
        dims = zip(sizes, begin, end, strict=True)
        return [n for dim in dims if not _is_sliced_by_proxies(*dim, is_constant=is_constant) for n in dim]
    if prim.sym.id is PrimIDs.PAD:
        return [size for size, padding in zip(sizes, prim.args[2], strict=True) if any(padding)]
    numbers = [p for p in prim.flat_proxy_args if isinstance(p, NumberProxy)]
    return [*numbers, *[size for tensor in tensors for size in shape_of(tensor)]]


def _is_sliced_by_proxies(size: Any, begin: Any, end: Any, *, is_constant: bool) -> bool:
    if is_constant and isinstance(end, NumberProxy):
        return isinstance(begin, NumberProxy) or bool(begin == 0)
    if isinstance(size, NumberProxy):  # the whole dimension
        return isinstance(begin, int) and begin == 0 and isinstance(end, NumberProxy) and end.name == size.name
    return not (isinstance(begin, NumberProxy) or isinstance(end, NumberProxy))
