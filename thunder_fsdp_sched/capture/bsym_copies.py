"""Copies of bound symbols with other proxies and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.operands import OneParameter
from ..ir.symbols import fsdp_reduce, fsdp_unshard
from ..private_traces import CachingBoundSymbol, renamed
from .trace_tokens import Parameter

__all__ = ["BoundSymbolCopies"]


class BoundSymbolCopies:
    """Copies bound symbols into a trace.

    Args:
        trace: gives names to new proxies.
        new: the proxies that take the place of others, by the names of those. All that copied bound symbols define are
            added to it; proxies that are neither in it nor defined stay as they are.
        parameters: the parameters that take the place of others in ``fsdp_unshard`` and ``fsdp_reduce``.
    """

    def __init__(
        self,
        trace: TraceCtx,
        new: dict[str, Proxy],
        *,
        parameters: Mapping[Parameter, Parameter] | None = None,
    ) -> None:
        self.new = new
        self._trace = trace
        self._parameters = parameters or {}

    def copy(self, bsym: BoundSymbol) -> BoundSymbol:
        """Return a copy of a bound symbol and its subsymbols."""
        subsymbols = [self.copy(sub) for sub in bsym.subsymbols]
        for proxy in bsym.flat_proxy_outs:
            if proxy.name not in self.new:
                self.new[proxy.name] = renamed(proxy, self._trace, self.tags_of(proxy))
        if self._parameters and bsym.sym in (fsdp_unshard, fsdp_reduce):
            operands = OneParameter(bsym)
            parameter = self._parameters[operands.bucket, operands.index]
            return bsym.from_bsym(args=(*parameter, self.swap(operands.tensor)), output=self.swap(bsym.output))
        if isinstance(bsym, CachingBoundSymbol):
            return bsym.with_proxies(self.new, subsymbols)
        args, kwargs, output = self.swap(bsym.args), self.swap(bsym.kwargs), self.swap(bsym.output)
        return bsym.from_bsym(args=args, kwargs=kwargs, output=output, subsymbols=subsymbols)

    def tags_of(self, proxy: Proxy) -> set[Any]:
        """Return the tags of the proxy that takes the place of one that bound symbols define."""
        return set(proxy.tags)

    def swap(self, value: Any) -> Any:
        """Return ``value`` with new proxies."""
        if isinstance(value, Proxy):
            return self.new.get(value.name, value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.swap(item) for item in value])
        if kind is dict:
            return {key: self.swap(item) for key, item in value.items()}
        return value
