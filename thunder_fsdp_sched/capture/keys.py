"""What of a bound symbol decides how Thunder transforms it."""

from __future__ import annotations

from typing import Any

from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.operands import OneParameter
from ..ir.symbols import fsdp_reduce, fsdp_unshard
from ..runtime.bucket import Bucket
from .tokens import Same, token_of

__all__ = ["Indescribable", "Parameter", "TraceTokens"]

Parameter = tuple[Bucket, int]
"""A parameter: its bucket, and its number there."""


class Indescribable(Exception):
    """A trace has something that tokens cannot describe."""


class TraceTokens:
    """Tokens of bound symbols and values, with proxies and parameters numbered in order of appearance.

    Attributes:
        tokens: of all that was added since the last :meth:`begin`.
        proxies: the proxies among it in order of appearance, by name.
        parameters: the parameters among it that are unsharded or reduced, in order of appearance, with their numbers.
    """

    def __init__(self) -> None:
        self._facts: dict[int, Any] = {}  # of proxies that the trace keeps alive, by their identity, without tags
        self._facts_of_parameters: dict[Parameter, Any] = {}
        self._shared: dict[Any, Any] = {}  # one object for equal facts
        self.begin()

    def begin(self) -> None:
        """Forget all that was added; what is known about proxies is kept."""
        self.tokens: list[Any] = []
        self.proxies: dict[str, Proxy] = {}
        self.parameters: dict[Parameter, int] = {}
        self._numbers: dict[str, int] = {}

    def add_bsym(self, bsym: BoundSymbol) -> None:
        positions = bsym.source_positions
        line = None if positions is None else positions.lineno
        tags = frozenset(bsym.tags)
        self.tokens += (Same(bsym.sym), bsym.header, bsym.source_filename, line, self._shared.setdefault(tags, tags))
        if bsym.sym in (fsdp_unshard, fsdp_reduce):
            self._add_parameter(OneParameter(bsym))
            self.add(bsym.output)
            return
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
            facts = self._facts.get(id(value))
            if facts is None:
                facts = self._facts[id(value)] = self._facts_of(value)
            number = self._numbers.get(value.name)
            if number is None:
                number = self._numbers[value.name] = len(self._numbers)
                self.proxies[value.name] = value
            self.tokens += (number, facts, frozenset(value.tags) if value.tags else None)
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

    def _add_parameter(self, operands: OneParameter) -> None:
        bucket, index = parameter = operands.bucket, operands.index
        facts = self._facts_of_parameters.get(parameter)
        if facts is None:
            spec = bucket.spec
            dtypes = spec.param_dtype, spec.dtype, spec.reduce_dtype
            shapes = tuple(spec.params[index].shape), tuple(spec.layout.placements[index].shard_shape(bucket.rank))
            facts = str(spec.device), str(spec.shard_device), dtypes, shapes
            self._facts_of_parameters[parameter] = facts
        self.tokens += (self.parameters.setdefault(parameter, len(self.parameters)), facts)
        self.add(operands.tensor)

    def _facts_of(self, proxy: Proxy) -> Any:
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
        facts = kind, *facts
        return self._shared.setdefault(facts, facts)
