"""Verify traces again that later transforms have changed.

[Note: Whose value it is]
The operands of a reduction, the shards of a gather and the results of a wait belong to the parameters of a bucket by
position. A trace in which two gradients of equal shape are swapped looks as valid as the right one. So a trace is
compared with the one from which it was made:

- Passes between Thunder's split and ``verify`` move statements and rename nothing. ``verify`` compares the names.
- Transforms of others may rename, fuse and replace values. ``check_values`` numbers the values of both traces: two
  values have the same number if the same operator computes them from values with the same numbers. If a transform
  computes a value in its own way and keeps its name, it counts as the same value. Under a new name it must derive from
  the right value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import effects, is_declared
from ..ir.inspection import UNPACKING, args_of, is_backward_trace, names, outs_of, return_of, statement
from ..ir.operator_facts import is_pure
from ..ir.registry import handles_of
from .machine import Machine, VerificationError
from .verify import returned_by


def check_values(before: Sequence[TraceCtx], after: Sequence[TraceCtx]) -> None:
    """Raise an error unless statements of this package, and returns, read the same values as before.

    Args:
        before: the forward trace, and the backward trace if there is one.
        after: the same traces, with the same statements of this package in the same order.

    Raises:
        VerificationError: names the statement, and the parameter if its bucket tells.
    """
    known = _Values()
    changed = _Values(known)
    for old, new in zip(before, after, strict=True):
        known.follow(old)
        changed.follow(new)


class _Values:
    """The numbers of values in traces that run one after the other.

    Args:
        before: the numbers in the same traces before they were changed.

    Attributes:
        number_of: the number of each value, by its name, in the latest trace.
        expected: the operands of each statement in the latest trace, as names and numbers.
        sources: for a number that the earlier traces do not have, the numbers from which it derives.
    """

    def __init__(self, before: _Values | None = None) -> None:
        self.before = before
        self.numbers: dict[Any, int] = {} if before is None else before.numbers
        self.sources: dict[int, frozenset[int]] = {}
        self.saved: dict[tuple[int, ...], int] = {}
        self.number_of: dict[str, int] = {}
        self.expected: list[list[tuple[str, int]]] = []

    def follow(self, trace: TraceCtx) -> None:
        """Number the values of the next trace, and compare them with those before."""
        self.half = "backward" if is_backward_trace(trace) else "forward"
        self.number_of, self.expected = {}, []
        self.repeated: Counter[Any] = Counter()
        paths: dict[str, tuple[int, ...]] = {}
        if self.half == "forward":  # backward unpacks its arguments
            for position, name in enumerate(names(tree_iter((trace.args, trace.kwargs)))):
                self.number_of[name] = self._number(("argument", position))
        for bsym in trace.bound_symbols:
            if bsym.sym.id in UNPACKING:
                self._unpack(bsym, paths)
            elif is_declared(bsym.sym) or bsym.sym.id is PrimIDs.RETURN:
                self._compare(bsym)
                for index, name in enumerate(outs_of(bsym)):
                    self._define(bsym, name, (self.half, "result", len(self.expected), index))
            elif bsym.sym.id is not PrimIDs.DEL:
                for part in bsym.subsymbols if bsym.sym.is_fusion else ():
                    self._compute(bsym, part)
                if any(name not in self.number_of for name in outs_of(bsym)):
                    self._compute(bsym, bsym)
        groups = return_of(trace).args[1:2]
        self.saved = {
            (index, place): self.number_of[value.name]
            for group in groups
            for index, values in enumerate(group)
            for place, value in enumerate(values)
            if isinstance(value, Proxy)
        }

    def _number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _unpack(self, bsym: BoundSymbol, paths: dict[str, tuple[int, ...]]) -> None:
        """Give unpacked values the numbers that they had when forward saved them; a path is a position among these."""
        source = next(iter(args_of(bsym)), None)
        for index, name in enumerate(p.name for p in bsym.flat_proxy_outs):
            first = () if self.half == "backward" and not paths else (-1 - len(paths),)
            paths[name] = first if source is None else (*paths.get(source, first), index)
            if paths[name] in self.saved:
                self._set(bsym, name, self.saved[paths[name]])
            elif self.half == "backward" or name not in self.number_of:
                self._define(bsym, name, (self.half, "unpacked", paths[name]))

    def _compute(self, bsym: BoundSymbol, part: BoundSymbol) -> None:
        leaves, spec = part.flat_args_and_spec
        read = [self.number_of.get(leaf.name, -1) if isinstance(leaf, Proxy) else repr(leaf) for leaf in leaves]
        operator = (part.sym.name, part.sym.id, str(spec), *read)
        if not is_pure(part):  # it may return other values each time
            self.repeated[operator] += 1
            operator = (self.half, self.repeated[operator], *operator)
        for index, name in enumerate(outs_of(part)):
            if self.before is not None and (operator, index) not in self.numbers:
                number = self.before.number_of.get(name)
                if number is None:
                    number = self._number((operator, index))
                    of = [each for each in read if isinstance(each, int)]
                    self.sources[number] = frozenset(of).union(*(self.sources.get(each, ()) for each in of))
                self.number_of[name] = number
            else:
                self._define(bsym, name, (operator, index))

    def _define(self, bsym: BoundSymbol, name: str, key: Any) -> None:
        self._set(bsym, name, self._number(key))

    def _set(self, bsym: BoundSymbol, name: str, number: int) -> None:
        if self.before is not None and self.before.number_of.get(name, number) != number:
            self._fail(bsym, f"defines {name!r} as another value than before")
        self.number_of[name] = number

    def _compare(self, bsym: BoundSymbol) -> None:
        operands = [(name, self.number_of.get(name, -1)) for name in _read_by(bsym)]
        self.expected.append(operands)
        if self.before is None:
            return
        expected = self.before.expected[len(self.expected) - 1]
        if len(operands) != len(expected):
            self._fail(bsym, f"has {len(operands)} operands, and had {len(expected)}")
        for (name, number), (was, value) in zip(operands, expected, strict=True):
            if number != value and value not in self.sources.get(number, ()):
                self._fail(bsym, f"reads {name!r}{self._role(bsym, name)}, which is not what it read before, {was!r}")

    def _role(self, bsym: BoundSymbol, name: str) -> str:
        region = effects(bsym).collects.get(name)
        if region is None or region.param is None:
            return ""
        return f" as the gradient of parameter {region.bucket.spec.params[region.param].name!r}"

    def _fail(self, bsym: BoundSymbol, what: str) -> NoReturn:
        raise coded_error(
            VerificationError,
            "proof.statement-with-other-values",
            half=self.half,
            fault=what,
            statement=statement(bsym),
        )


def _read_by(bsym: BoundSymbol) -> Iterator[str]:
    """Return the names that a statement reads; for the return statement, those of the outputs alone."""
    return iter(returned_by(bsym)[0] if bsym.sym.id is PrimIDs.RETURN else args_of(bsym))


def verify_again(
    verified: Sequence[TraceCtx], final: Sequence[TraceCtx], *, max_gathers_in_flight: int | None, after: str
) -> None:
    """Verify the traces that Thunder turns into programs, which later transforms have made of the verified ones.

    Args:
        verified: the forward trace, and the backward trace if there is one, as this plugin has returned them.
        final: the same traces after the transforms that follow.
        max_gathers_in_flight: see ``verify``.
        after: the names of these transforms, for messages.

    Raises:
        VerificationError: a transform has removed, added or reordered statements of this plugin, which the ranks have
            agreed on, or the trace breaks a promise.
    """
    try:
        for old, new in zip(verified, final, strict=True):
            half = "backward" if is_backward_trace(old) else "forward"
            mine, theirs = ([b for b in trace.bound_symbols if is_declared(b.sym)] for trace in (old, new))
            for was, now in itertools.zip_longest(mine, theirs):
                if was is None or now is None or _identity(was) != _identity(now):
                    was_text, now_text = ("nothing" if bsym is None else statement(bsym) for bsym in (was, now))
                    raise coded_error(
                        VerificationError, "proof.statements-out-of-order", half=half, before=was_text, now=now_text
                    )
        machine = Machine(max_gathers_in_flight)
        for trace in final:
            machine.run(trace)
        check_values(verified, final)
    except VerificationError as error:
        raise coded_error(
            VerificationError, "proof.later-transform-broke-trace", transforms=after, error=error
        ) from None


def _identity(bsym: BoundSymbol) -> tuple[Any, ...]:
    """Return the symbol and the buckets, slots and the like on which it operates."""
    return bsym.sym, *handles_of(bsym)
