"""Keys and copies of bound symbols: equal keys mean equal transformation, up to proxies and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.symbols import fsdp_reduce, fsdp_unshard
from ..private_traces import CachingBoundSymbol, renamed
from ..runtime.bucket import Bucket
from .keys import Same, key_of

Parameter = tuple[Bucket, int]
"""A parameter: its bucket, and its index there."""


class ModuleCall:
    """The tag of the bound symbols that one call of a module has added to a trace."""


class Structure(NamedTuple):
    """The structure of bound symbols and values.

    Attributes:
        key: equal for values that differ only in their proxies, their parameters and the calls they belong to.
        proxies: the proxies in order of appearance, by name.
        parameters: the parameters that are unsharded or reduced, in order of appearance.
    """

    key: tuple[Any, ...]
    proxies: dict[str, Proxy]
    parameters: tuple[Parameter, ...]


class _Unknown(Exception):
    """A proxy is of a kind that is not known here."""


class StructuralKeys:
    """Computes structures of values in one trace, which it assumes to stay alive."""

    def __init__(self) -> None:
        self._facts: dict[int, Any] = {}  # of proxies by their identity, without tags
        self._facts_of_parameters: dict[Parameter, Any] = {}
        self._shared: dict[Any, Any] = {}  # one object for equal facts

    def of(self, *values: Any) -> Structure | None:
        """Return the structure of bound symbols and other values; ``None`` if it is unknown."""
        self._key: list[Any] = []
        self._proxies: dict[str, Proxy] = {}
        self._numbers: dict[str, int] = {}
        self._parameters: dict[Parameter, int] = {}
        try:
            for value in values:
                self._add(value)
        except _Unknown:
            return None
        return Structure(tuple(self._key), self._proxies, tuple(self._parameters))

    def _add(self, value: Any) -> None:
        if isinstance(value, Proxy):
            facts = self._facts.get(id(value))
            if facts is None:
                facts = self._facts[id(value)] = self._facts_of(value)
            number = self._numbers.get(value.name)
            if number is None:
                number = self._numbers[value.name] = len(self._numbers)
                self._proxies[value.name] = value
            self._key += (number, facts, frozenset(value.tags) if value.tags else None)
            return
        kind = type(value)
        if kind is tuple or kind is list:
            self._key += (kind, len(value))
            for item in value:
                self._add(item)
        elif kind is dict:
            self._key += (kind, len(value))
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif isinstance(value, BoundSymbol):
            self._add_bsym(value)
        elif isinstance(value, Device | dtype):
            self._key += (kind, str(value))
        else:
            self._key.append(key_of(value, 0))

    def _add_bsym(self, bsym: BoundSymbol) -> None:
        positions = bsym.source_positions
        line = None if positions is None else positions.lineno
        tags = frozenset(tag for tag in bsym.tags if not isinstance(tag, ModuleCall))
        self._key += (Same(bsym.sym), bsym.header, bsym.source_filename, line, self._shared.setdefault(tags, tags))
        if bsym.sym in (fsdp_unshard, fsdp_reduce):
            self._add_parameter(*bsym.args)
            self._add(bsym.output)
            return
        self._add(bsym.args)
        self._add(bsym.kwargs)
        self._add(bsym.output)
        for context in (bsym._call_ctx, bsym._import_ctx, bsym._object_ctx):
            self._add(dict(context or {}))
        self._key.append(len(bsym.subsymbols))
        for sub in bsym.subsymbols:
            self._add_bsym(sub)

    def _add_parameter(self, bucket: Bucket, index: int, tensor: Proxy) -> None:
        parameter = bucket, index
        facts = self._facts_of_parameters.get(parameter)
        if facts is None:
            spec = bucket.spec
            dtypes = spec.param_dtype, spec.dtype, spec.reduce_dtype
            shapes = tuple(spec.params[index].shape), tuple(spec.layout.placements[index].shard_shape(bucket.rank))
            facts = str(spec.device), str(spec.shard_device), dtypes, shapes
            self._facts_of_parameters[parameter] = facts
        self._key += (self._parameters.setdefault(parameter, len(self._parameters)), facts)
        self._add(tensor)

    def _facts_of(self, proxy: Proxy) -> Any:
        kind = type(proxy)
        facts: tuple[Any, ...]
        if isinstance(proxy, TensorProxy | FutureTensorProxy):
            facts = tuple(proxy.shape), str(proxy.device), str(proxy.dtype), proxy.requires_grad
            if isinstance(proxy, TensorProxy):
                facts += str(proxy.true_dtype), proxy.distparallel_type, proxy.thunder_fsdp_padding_size
        elif isinstance(proxy, NumberProxy):
            facts = key_of(proxy.value, 0), proxy.python_type, proxy.constraint
        else:
            raise _Unknown
        facts = kind, *facts
        return self._shared.setdefault(facts, facts)


class BoundSymbolCopies:
    """Copies bound symbols into a trace.

    Args:
        trace: names new proxies.
        new: the proxies that replace others, by the names of those. Copies for all that the copied bound symbols define
            are added to it; proxies that are neither in it nor defined stay as they are.
        parameters: the parameters that replace others in ``fsdp_unshard`` and ``fsdp_reduce``.
    """

    def __init__(
        self, trace: TraceCtx, new: dict[str, Proxy], *, parameters: Mapping[Parameter, Parameter] | None = None
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
            bucket, index, tensor = bsym.args
            parameter = self._parameters[bucket, index]
            return bsym.from_bsym(args=(*parameter, self.swap(tensor)), output=self.swap(bsym.output))
        if isinstance(bsym, CachingBoundSymbol):
            return bsym.with_proxies(self.new, subsymbols)
        args, kwargs, output = self.swap(bsym.args), self.swap(bsym.kwargs), self.swap(bsym.output)
        return bsym.from_bsym(args=args, kwargs=kwargs, output=output, subsymbols=subsymbols)

    def tags_of(self, proxy: Proxy) -> set[Any]:
        """Return the tags of the proxy that replaces one that bound symbols define."""
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
