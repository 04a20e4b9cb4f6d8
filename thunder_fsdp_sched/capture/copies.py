"""Copies of everything that a recorded module call has added to the traces."""

from __future__ import annotations

from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst, WrappedValue, wrap, wrap_const
from thunder.core.jit_ext import EXT_FLAG_IS_CALLABLE, EXT_FLAG_IS_MODULE
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol

from ..private_thunder import added_checks, checks_of, renamed, renames_of
from .bound_symbols import BoundSymbolCopies, renew_calls
from .grad_modes import GradMode, kwargs_in, tags_in
from .observer import Observer
from .paths import ATTRIBUTE, FUNCTION, Path, evaluate
from .records import Arguments, Record


def repeat(
    record: Record, observer: Observer, module: WrappedValue, place: Path, arguments: Arguments, mode: GradMode
) -> WrappedValue:
    """Add copies of everything that the recorded call added to the traces; return the wrapped result of the call.

    Args:
        place: the path of ``module``, for which the record fits.
        arguments: those of the call, with the same key as in the recorded one.
        mode: the grad mode of the call, in which the record holds.
    """
    context = observer.context
    copies = _Copies(record, observer, mode, {place: module.provenance, (FUNCTION,): observer.root})
    copies.new.update(
        (old.name, wrapped.value) for old, wrapped in zip(record.arguments, arguments.tensors, strict=True)
    )
    for read, check, proxy, expected in record.checks:
        path = read.at(place)
        if (path, check) not in observer.written:
            copies.check(path, check, proxy, expected)
    for name, read in record.inputs.items():
        if name not in copies.new:
            copies.new[name] = copies.wrap_tensor(read.at(place)).value
    scope = context.computation_trace.peek_scope()
    added = [copies.copy(bsym) for bsym in record.bsyms]
    renew_calls(added)
    scope.extend(added)
    for old, name in record.renames.items():
        if not context.computation_trace.has_name(name):
            renames_of(context)[variableify(copies.new[old])] = copies.new[old].replace_name(name)
    provenance = ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[module.provenance])
    return wrap(copies.swap(record.result), provenance=provenance)


class _Copies(BoundSymbolCopies):
    """Copies for one repetition."""

    def __init__(
        self, record: Record, observer: Observer, mode: GradMode, provenances: dict[Path, ProvenanceRecord]
    ) -> None:
        super().__init__(observer.context.computation_trace, {})
        self._context = observer.context
        self._checked = observer.checked_names
        self._record = record
        self._mode = mode
        self._provenances = provenances
        self._known = dict(observer.roots)
        self._wrapped: dict[Path, WrappedValue] = {}

    def check(self, path: Path, check: Any, proxy: Proxy, expected: tuple[Any, ...]) -> None:
        """Write a check of the value at ``path`` to the prologue."""
        value = evaluate(path, self._known)
        if isinstance(value, torch.Tensor):
            self.new[proxy.name] = self.wrap_tensor(path).value  # Thunder checks what it wraps
            return
        if (value,) != expected or type(value) is not type(expected[0]):  # an attribute that the program does not read
            wrap(value, provenance=self._provenance(path))
            return
        new = renamed(proxy, self._trace, set(proxy.tags))
        new.history = self._provenance(path)
        self.new[proxy.name] = new
        checks_of(self._context).append((check, new, *expected))

    def wrap_tensor(self, path: Path) -> WrappedValue:
        """Return the tensor at ``path`` as the interpreter wraps it, with a proxy."""
        if path not in self._wrapped:
            with added_checks(self._context) as added:
                self._wrapped[path] = wrap(evaluate(path, self._known), provenance=self._provenance(path))
            is_new = self._checked.isdisjoint(check[1].name for check in added)
            for check in added:
                if is_new:
                    checks_of(self._context).append(check)
                else:
                    self._context.add_constraint(check)  # which leaves out those that there are
                self._checked.add(check[1].name)
        return self._wrapped[path]

    def copy(self, bsym: BoundSymbol) -> BoundSymbol:
        """Return a copy of a bound symbol, for the grad mode of this call."""
        new = super().copy(bsym)
        if self._record.validity.is_portable and (kwargs := kwargs_in(bsym, self._mode.enabled)) is not bsym.kwargs:
            new = new.from_bsym(kwargs=self.swap(kwargs))
        return new

    def tags_of(self, proxy: Proxy) -> set[Any]:
        tags = self._record.tags[proxy.name]
        return tags_in(proxy, tags, self._mode.enabled) if self._record.validity.is_portable else set(tags)

    def _provenance(self, path: Path) -> ProvenanceRecord:
        """Return the provenance of the value at ``path``, as the interpreter makes it."""
        if path not in self._provenances:
            if len(path) == 1:
                return wrap_const(evaluate(path, self._known)).provenance
            kind, key = path[-1]
            inst = PseudoInst.LOAD_ATTR if kind == ATTRIBUTE else PseudoInst.BINARY_SUBSCR
            inputs = [self._provenance(path[:-1]), wrap_const(key).provenance]
            self._provenances[path] = ProvenanceRecord(inst, inputs=inputs)
            value = evaluate(path, self._known)
            if isinstance(value, torch.nn.Module):
                self._provenances[path].ext_flag |= EXT_FLAG_IS_MODULE
            elif callable(value):  # of a module, the prologue then reads it from the user's module, not the jitted one
                self._provenances[path].ext_flag |= EXT_FLAG_IS_CALLABLE
        return self._provenances[path]
