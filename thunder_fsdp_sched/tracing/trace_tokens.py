"""What of a bound symbol decides how Thunder transforms it."""

from __future__ import annotations

from typing import Any

from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from .tokens import Same, token_of

__all__ = ["Indescribable", "TraceTokens"]


class Indescribable(Exception):
    """A trace has something that tokens cannot describe."""


class TraceTokens:
    """Tokens of bound symbols and values, with proxies numbered in order of appearance."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[int, Any] = {}  # tokens of proxies that the trace keeps alive, by their identity
        self._shared: dict[Any, Any] = {}  # one object for equal metadata

    def add_bsym(self, bsym: BoundSymbol) -> None:
        positions = bsym.source_positions
        line = None if positions is None else positions.lineno
        tags = frozenset(bsym.tags)
        self.tokens += (Same(bsym.sym), bsym.header, bsym.source_filename, line, self._shared.setdefault(tags, tags))
        self.add(bsym.args)
        self.add(bsym.kwargs)
        self.add(bsym.output)
        for context in (bsym._call_ctx, bsym._import_ctx, bsym._object_ctx):
            self.tokens.append(len(context or ()))
            if context:
                self.add(dict(context))
        self.tokens.append(len(bsym.subsymbols))
        for sub in bsym.subsymbols:
            self.add_bsym(sub)

    def add(self, value: Any) -> None:
        if isinstance(value, Proxy):
            token = self._known.get(id(value))
            if token is None:
                token = self._known[id(value)] = self._proxy(value)
            self.tokens.append(token)
            return
        kind = type(value)
        if kind is tuple or kind is list:
            self.tokens += (kind, len(value))
            for item in value:
                self.add(item)
        elif kind is dict:
            self.tokens += (kind, len(value))
            for key, item in value.items():
                self.add(key)
                self.add(item)
        elif isinstance(value, Device | dtype):
            self.tokens += (kind, str(value))
        else:
            self.tokens.append(token_of(value, 0))

    def _proxy(self, proxy: Proxy) -> Any:
        kind = type(proxy)
        facts: tuple[Any, ...]
        if isinstance(proxy, TensorProxy | FutureTensorProxy):
            facts = tuple(proxy.shape), str(proxy.device), str(proxy.dtype), proxy.requires_grad
            if isinstance(proxy, TensorProxy):
                facts += str(proxy.true_dtype), proxy.distparallel_type, proxy.thunder_fsdp_padding_size
        elif isinstance(proxy, NumberProxy):
            facts = token_of(proxy.value, 0), proxy.python_type, proxy.constraint
        else:
            raise Indescribable
        facts = kind, *facts, frozenset(proxy.tags)
        return self._numbers.setdefault(proxy.name, len(self._numbers)), self._shared.setdefault(facts, facts)
