"""Replace in-place operators by out-of-place ones.

[Note: Writes in place]
Thunder computes the result of ``y.mul_(2)`` and copies it into the memory of ``y``. Its autograd treats the copy as the
only new value: gradients pass neither from ``y`` to a written view of it nor back, and values that are saved for
backward are overwritten. So this pass makes each write compute a new value instead, before anything is differentiated:

- A tensor that is no view (a *base*) has a value, which each write replaces. Each view keeps the operators that made it.
- A write to a view computes the new value of its base: ``reshape`` and ``transpose`` are undone, and a slice is set in a
  copy of the tensor that it was taken from.
- A view that is read after a write is made again from the base.
- A write that autograd must not see (under ``torch.no_grad()``) becomes ``fsdp_with_value(old, new)``: the new values, with
  the gradient of the old ones.
- The result of ``detach()`` shares memory with its argument, but has a history of its own in autograd: it requires a
  gradient once a value that has one is written to it. A write through either of the two does not show in the history
  of the other.
- At the end, the new values of arguments and buffers are copied into their memory.

Whether ``reshape`` returns a view depends on strides. The strides of values are those that torch's functions return for
contiguous arguments. So if a write depends on them, the prologue checks that the arguments are contiguous.

Errors refuse writes to views that cannot be undone (``diagonal``, ``expand``, other dtypes), to parameters, to
arguments that require gradients, and to an argument whose memory another one shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.compile_data import using_symbolic_values
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_iter, tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.extend import TemporaryExecutor

from ..errors import coded_error
from ..ir.gradients import mark_constants, with_gradient
from ..ir.inspection import (
    args_of,
    defined_by,
    like,
    names,
    nested,
    outs_of,
    recording,
    return_of,
    source_of,
    swap_args,
    with_bound_symbols,
)
from ..ir.operator_facts import facts_of, observed_call, tensors_read, tensors_returned
from ..runtime.traced_inputs import MemoryOfInputs
from .wrong_gradients import fsdp_zero_gradient, register_value

fsdp_with_value = register_value("fsdp_with_value", lambda old, grad: grad)


def write_out_of_place(
    trace: TraceCtx, *, original: TraceCtx, parameters: Mapping[str, str]
) -> tuple[TraceCtx, MemoryOfInputs]:
    """Return the computation without writes to values that it reads, and what the prologue must check.

    Runs first on the computation. Does nothing if all writes are to arguments that nothing else reads, such as the
    statistics of a batch norm. Before::

        v = ltorch.view(y, -1)
        t9 = ltorch.mul_(v, 0.5)
            # t8 = ltorch.mul(v, 0.5)
            # t9 = prims.copy_(t8, v, grad_enabled=True)
        return {'output': (y,), 'flat_args': ...}

    After::

        v = ltorch.view(y, -1)
        t8 = ltorch.mul(v, 0.5)
        t12 = prims.reshape(t8, (2, 4))
        return {'output': (t12,), 'flat_args': ...}

    Args:
        original: the computation before Thunder has inserted ``update_aliases``.
        parameters: for the arguments that are parameters, the name of the parameter.

    Raises:
        NotImplementedError: a write cannot be expressed that way; names the line.
    """
    copies = [
        like(bsym, copy) for bsym in original.bound_symbols for copy in nested([bsym]) if copy.sym.id is PrimIDs.COPY_
    ]
    if not copies:
        return trace, MemoryOfInputs()
    arguments = {a.name: a for a in original.args if isinstance(a, TensorProxy)}
    inputs = frozenset(arguments).difference(parameters)
    written = {b.args[1].name for b in copies}
    for bsym in copies:
        _check_argument(arguments.get(bsym.args[1].name), bsym, parameters)
    readers = [
        name for b in original.bound_symbols[:-1] if b.sym.id is not PrimIDs.UNPACK_TRIVIAL for name in set(args_of(b))
    ]
    if written <= frozenset(arguments) and all(readers.count(name) == 1 for name in written):
        return trace, MemoryOfInputs(written=frozenset(written))
    if using_symbolic_values():
        _refuse(copies[0], "module.in-place-change-needs-fixed-sizes")
    rewriting = _Rewriting(original, parameters)
    new = rewriting.run()
    return new, MemoryOfInputs(rewriting.written & inputs, inputs if rewriting.depends_on_strides else frozenset())


class _View(NamedTuple):
    """A view of ``parent``, and the prim that makes it: ``None`` for the tensor itself, or for its values (detach)."""

    parent: str
    prim: BoundSymbol | None
    is_detached: bool = False


class _Rewriting:
    """The values of tensors while a computation is rewritten, by the names that they have in it."""

    def __init__(self, trace: TraceCtx, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._old, self._new = trace, from_trace(trace)
        self._proxies = {a.name: a for a in trace.args if isinstance(a, TensorProxy)}
        self._arguments = dict(self._proxies)
        self._views: dict[str, _View] = {}
        # For each view that cannot be undone, which counts as a base: its operator, and the tensors of which it is a view.
        self._unknown: dict[str, tuple[BoundSymbol, Sequence[str]]] = {}
        self._ambiguous: set[str] = set()  # bases of which something may be a view or a copy, by its strides
        self._versions: dict[str, int] = {}  # of bases: how often each was written
        self._values: dict[str, tuple[int, TensorProxy]] = {}  # the version of its base, and the value at that version
        self._with_history: dict[str, TensorProxy] = {}  # by result of detach: the last value written with a gradient
        self._strides: dict[str, tuple[int, ...]] = {}
        self._needing = {name for name, a in self._arguments.items() if a.requires_grad}  # a gradient
        self._last_use = {name: i for i, b in enumerate(trace.bound_symbols) for name in args_of(b)}
        self._last_use |= dict.fromkeys(names(tree_iter(return_of(trace).args[0])), len(trace.bound_symbols))
        self._position = 0
        self._grad_enabled: dict[str, bool] = {}  # by argument that is written
        self.written: frozenset[str] = frozenset()
        self.depends_on_strides = False

    def run(self) -> TraceCtx:
        with tracectx(self._new):
            for position, bsym in enumerate(self._old.bound_symbols[:-1]):
                self._position = position
                self._add(bsym)
            self._return()
        return with_bound_symbols(self._new, self._new.bound_symbols, "fsdp: write out of place")

    def _add(self, bsym: BoundSymbol) -> None:
        self._proxies.update({p.name: p for p in defined_by(bsym) if isinstance(p, TensorProxy)})
        if bsym.sym.id is PrimIDs.COPY_:
            with recording(self._new, bsym) as added:
                self._write(bsym)
            self._new.bound_symbols += added
        elif bsym.sym.id is PrimIDs.UPDATE_ALIASES:
            for new, old in zip(bsym.flat_proxy_outs, bsym.flat_proxy_args, strict=True):
                self._note_same(new.name, old.name)
        elif any(b.sym.id is PrimIDs.COPY_ for b in nested(bsym.subsymbols)):
            if bsym.sym.id == ltorch.checkpoint.id or isinstance(bsym.sym.executor, TemporaryExecutor):
                _refuse(bsym, "module.in-place-change-in-region")
            for sub in bsym.subsymbols:
                self._add(like(bsym, sub))
        else:
            with recording(self._new, bsym) as added:
                read = {name: self._value(name) for name in tensors_read(bsym)}
            current = swap_args(bsym, {name: value for name, value in read.items() if value.name != name})
            self._new.bound_symbols += [*added, current]
            mark_constants([bsym])
            if not self._needing.isdisjoint(args_of(bsym)):
                self._needing.update(with_gradient(bsym))
            if bsym.sym.id is not PrimIDs.UNPACK_TRIVIAL:
                self._note_views(bsym)

    def _base(self, name: str) -> str:
        while name in self._views:
            name = self._views[name].parent
        return name

    def _history_of(self, name: str) -> str:
        """Return the tensor whose history autograd keeps for a tensor: its base, or a result of detach that it views."""
        while (view := self._views.get(name)) is not None and not view.is_detached:
            name = view.parent
        return name

    def _bases_of(self, name: str) -> Iterator[str]:
        """Yield the base of a tensor, and the bases of which it is a view that cannot be undone."""
        yield (base := self._base(name))
        for parent in self._unknown[base][1] if base in self._unknown else ():
            yield from self._bases_of(parent)

    def _value(self, name: str) -> TensorProxy:
        """Return the present value of a tensor. A view whose base was written since is made again."""
        version, known = self._versions.get(self._base(name), 0), self._values.get(name)
        if known is not None and known[0] == version:
            return known[1]
        view = self._views.get(name)
        if view is None:
            return self._proxies[name]
        value = self._value(view.parent)
        if view.is_detached:
            value = ltorch.detach(value)
            if name in self._with_history:
                value = fsdp_with_value(self._with_history[name], value)
        elif view.prim is not None:
            value = view.prim.sym(value, *view.prim.args[1:], **view.prim.kwargs)
        self._values[name] = version, value
        return value

    def _write(self, copy: BoundSymbol) -> None:
        source, target = (p.name for p in copy.args[:2])
        base, is_seen = self._base(target), bool(copy.kwargs["grad_enabled"])
        for each in self._bases_of(base):
            _check_argument(self._arguments.get(each), copy, self._parameters)
        for unknown, (operator, _) in self._unknown.items():
            if base in self._bases_of(unknown) and (base == unknown or self._is_read_later(unknown)):
                _refuse(
                    copy,
                    "module.in-place-change-of-unknown-view",
                    operator=operator.sym.name,
                    place=source_of(operator),
                )
        value, name, has_gradient, is_part = self._value(source), target, source in self._needing, False
        values, of_views = dict[str, TensorProxy](), dict[str, TensorProxy]()
        while True:
            view = self._views.get(name)
            if view is None or view.is_detached:
                if not is_seen and (has_gradient or name in self._needing):
                    value, of_views = fsdp_with_value(self._value(name), value), {}
                elif has_gradient:
                    self._needing.update(n for n in self._proxies if self._history_of(n) == name)
                elif name in self._needing and not is_part:
                    value, of_views = fsdp_zero_gradient(self._value(name), value), {}
                values |= {**of_views, name: value}
                if view is None:
                    break
                if name in self._needing:
                    self._with_history[name] = value
                value = ltorch.detach(value)  # another tensor, since both may be returned
                has_gradient, is_seen, is_part, of_views = False, False, False, {}
            else:
                of_views[name] = value
                is_part = is_part or (view.prim is not None and view.prim.sym.id is PrimIDs.SLICE)
                value = value if view.prim is None else _undo(view.prim, self._value(view.parent), value, copy)
            name = view.parent
        self._versions[base] = version = self._versions.get(base, 0) + 1
        self._values.update({each: (version, v) for each, v in values.items()})
        self._note_same(copy.output.name, target)
        self.depends_on_strides |= base in self._ambiguous
        if base in self._arguments:
            self.written |= {base}
            self._grad_enabled[base] = bool(copy.kwargs["grad_enabled"])

    def _is_read_later(self, base: str) -> bool:
        """Return whether anything from here on reads a base or a view of it."""
        return any(self._base(name) == base for name, last in self._last_use.items() if last >= self._position)

    def _note_same(self, name: str, known: str) -> None:
        """Record another name of a tensor."""
        self._views[name] = _View(known, None)
        if known in self._needing:
            self._needing.add(name)

    def _note_views(self, bsym: BoundSymbol) -> None:
        read, returned = tensors_read(bsym), tensors_returned(bsym)
        observed = observed_call(bsym, {name: self._strides[name] for name in read if name in self._strides})
        if observed is not None:
            pairs = zip(returned, observed.strides, strict=True)
            self._strides.update({name: strides for name, strides in pairs if strides is not None})
            pairs_of_aliases = zip(returned, observed.aliases, strict=True)
            aliases = {name: [read[i] for i in of] for name, of in pairs_of_aliases if of}
        else:
            aliases = {name: list(of) for name, of in facts_of(bsym).aliases.items()}
        if bsym.sym.name in _BY_STRIDES:
            self._ambiguous.update(map(self._base, read))
        for name in outs_of(bsym):
            if name in aliases:
                views = _derivation(bsym, name, aliases[name])
                if observed is None and bsym.sym.name in _BY_STRIDES and not self._is_viewable(bsym, name):
                    continue
                if views is None:
                    self._unknown[name] = bsym, aliases[name]
                    continue
                self._views.update(views)
                self._values[name] = self._versions.get(self._base(name), 0), self._proxies[name]

    def _is_viewable(self, bsym: BoundSymbol, name: str) -> bool:
        """Return whether the result of a reshape is a view, by the strides of its argument."""
        argument, result = bsym.flat_proxy_args[0], self._proxies[name]
        if argument.name not in self._strides:
            return True
        try:
            strided = torch.empty_strided(tuple(argument.shape), self._strides[argument.name], device="meta")
            self._strides[name] = strided.view(tuple(result.shape)).stride()
        except RuntimeError:
            return False
        return True

    def _return(self) -> None:
        returned = return_of(self._old)
        copied: dict[str, TensorProxy] = {}
        for name in sorted(self.written):
            copied[name] = prims.copy_(self._value(name), self._arguments[name], grad_enabled=self._grad_enabled[name])

        given: set[str] = set()

        def current(leaf: Any) -> Any:
            if not isinstance(leaf, TensorProxy):
                return leaf
            whole = leaf.name
            while whole in self._views and self._views[whole].prim is None and not self._views[whole].is_detached:
                whole = self._views[whole].parent
            return copied[whole] if whole in copied else self._value(leaf.name)

        def output(leaf: Any) -> Any:
            value = current(leaf)
            if isinstance(value, TensorProxy) and value.name in given:  # each result gets a gradient of its own
                value = prims.clone(value)
            given.update(names([value]))
            return value

        known = returned.args[0]
        result = {**tree_map(current, known), "output": tree_map(output, known["output"])}
        self._new.bound_symbols.append(returned.from_bsym(args=(result,)))


_BY_STRIDES = frozenset({"reshape", "flatten", "contiguous", "ravel"})
"""Operators that return a view or a copy, by the strides of their argument."""

_SAME = frozenset({PrimIDs.SHALLOW_COPY, PrimIDs.STRIDE_ORDER, PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.DEVICE_PUT})
"""Prims that return the tensor itself, if they return a view."""

_UNDONE = frozenset({PrimIDs.RESHAPE, PrimIDs.SQUEEZE, PrimIDs.BROADCAST_IN_DIM, PrimIDs.TRANSPOSE, PrimIDs.SLICE})


def _derivation(bsym: BoundSymbol, name: str, parents: Sequence[str]) -> dict[str, _View] | None:
    """Return how an operator makes a view from prims; ``None`` if one of them is not known."""
    if bsym.sym.name == "detach":
        return {name: _View(parents[0], None, is_detached=True)}
    made_by = {out: b for b in nested([bsym]) if isinstance(b.sym.id, PrimIDs) for out in outs_of(b)}
    views: dict[str, _View] = {}
    while name not in parents:
        prim = made_by.get(name)
        if prim is None or prim.sym.id not in _SAME | _UNDONE:
            return None
        parent = prim.args[0].name
        views[name] = _View(parent, None if prim.sym.id in _SAME else prim)
        name = parent
    return views


def _undo(prim: BoundSymbol, whole: TensorProxy, part: TensorProxy, copy: BoundSymbol) -> TensorProxy:
    """Return the tensor ``whole`` after its view, which ``prim`` makes, has become ``part``."""
    if prim.sym.id is PrimIDs.TRANSPOSE:
        permutation = tuple(prim.args[1])
        return prims.transpose(part, tuple(sorted(range(len(permutation)), key=permutation.__getitem__)))
    if prim.sym.id is PrimIDs.SLICE:
        _, begin, end, steps = prim.args if len(prim.args) == 4 else (*prim.args, None)
        steps = steps or [1] * len(begin)
        return prims.copy_with_setitem(whole, tuple(map(slice, begin, end, steps)), part)
    if part.numel != whole.numel:
        _refuse(copy, "module.in-place-change-of-expanded-tensor")
    return prims.reshape(part, tuple(whole.shape))


def _check_argument(argument: TensorProxy | None, copy: BoundSymbol, parameters: Mapping[str, str]) -> None:
    """Raise an error for a write to an argument that gets a gradient."""
    if argument is not None and (argument.name in parameters or argument.requires_grad):
        if argument.name in parameters:
            _refuse(copy, "module.in-place-change-of-parameter", parameter=parameters[argument.name])
        _refuse(copy, "module.in-place-change-of-argument", argument=argument.name)


def _refuse(bsym: BoundSymbol, code: str, **values: object) -> NoReturn:
    where = f" at {source}" if (source := source_of(bsym)) else ""
    raise coded_error(NotImplementedError, code, where=where, **values)
