"""Keys and copies of bound symbols, and repeated regions. Equal keys mean equal transformation, up to proxies.

[Note: Regions]
When a module is called, the bound symbols that it adds to the trace get a common tag (``ModuleCall``). Tags survive the
passes that copy bound symbols. ``differentiate`` compares the structures of tagged regions, because a pass in between may
have changed one of them, but it does not search the trace for repetition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import FutureTensorProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..private_thunder import CachingBoundSymbol, renamed
from ..runtime.bucket import Bucket
from .effects import declared
from .inspection import args_of, defined_by, outs_of
from .value_keys import IdentityKey, key_of

Parameter = tuple[Bucket, int]
"""A parameter: its bucket, and its index there."""


class ModuleCall:
    """The tag of the bound symbols that one call of a module has added to a trace."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


IN_CHECKPOINT = "in a region of torch.utils.checkpoint"
"""The tag of the bound symbols that a call of ``torch.utils.checkpoint.checkpoint`` has added to a trace."""


class Structure(NamedTuple):
    """The structure of bound symbols and values."""

    key: tuple[Any, ...]  # equal for values that differ only in their proxies, their parameters and their calls
    proxies: dict[str, Proxy]  # in order of appearance, by name
    parameters: tuple[Parameter, ...]  # that are unsharded or reduced, in order of appearance


class _Unknown(Exception):
    """A proxy of a kind that has no key."""


class StructuralKeys:
    """Computes structures of values in one trace, which must stay alive."""

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
        self._key += (
            IdentityKey(bsym.sym),
            bsym.header,
            bsym.source_filename,
            line,
            self._shared.setdefault(tags, tags),
        )
        if declared(bsym).single is not None:
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
        new: the proxies that replace others, by the names of the others. Proxies for all results of the copied bound symbols
            are added to it. Other proxies stay as they are.
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
        if self._parameters and declared(bsym).single is not None:
            bucket, index, tensor = bsym.args
            parameter = self._parameters[bucket, index]
            return bsym.from_bsym(args=(*parameter, self.swap(tensor)), output=self.swap(bsym.output))
        if isinstance(bsym, CachingBoundSymbol):
            return bsym.with_proxies(self.new, subsymbols)
        args, kwargs, output = self.swap(bsym.args), self.swap(bsym.kwargs), self.swap(bsym.output)
        return bsym.from_bsym(args=args, kwargs=kwargs, output=output, subsymbols=subsymbols)

    def tags_of(self, proxy: Proxy) -> set[Any]:
        """Return the tags of the proxy that replaces a result of a copied bound symbol."""
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


class RepeatedRegion(NamedTuple):
    """The bound symbols of one module call, with a single result that later bound symbols read."""

    start: int  # the position of the first bound symbol
    stop: int  # the position after the last one
    parameters: tuple[Parameter, ...]  # that are unsharded, in order of appearance
    inputs: tuple[Proxy, ...]  # that it reads and does not define
    output: TensorProxy


def tag_call(bsyms: Iterable[BoundSymbol], module: torch.nn.Module) -> None:
    """Tag the bound symbols that a call of a module has added."""
    call = ModuleCall(module)
    for bsym in bsyms:
        bsym.tags.add(call)


def find_repeated_regions(
    bsyms: Sequence[BoundSymbol], last_use: Mapping[str, int], may_repeat: Callable[[BoundSymbol], bool]
) -> Iterator[list[RepeatedRegion]]:
    """Yield lists of at least two regions that differ in their proxies and parameters only; no two regions overlap.

    Args:
        bsyms: of a trace, without its return.
        last_use: the position of the last bound symbol that reads a value, by the value's name.
        may_repeat: whether a bound symbol may be part of a region.
    """
    free = [may_repeat(bsym) for bsym in bsyms]
    of_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, stop in sorted(_spans_of_calls(bsyms)):
        of_length[stop - start].append((start, stop))
    keys = StructuralKeys()
    # Those that may save the most work come first.
    for length, spans in sorted(of_length.items(), key=lambda found: -found[0] * (len(found[1]) - 1)):
        alike: dict[Any, list[RepeatedRegion]] = defaultdict(list)
        for start, stop in spans if len(spans) > 1 else ():
            if all(free[start:stop]):
                key, region = _read_region(bsyms, start, stop, last_use, keys)
                if region is not None:
                    alike[key].append(region)
        for regions in alike.values():
            if len(regions) > 1:
                yield regions
                for region in regions:
                    free[region.start : region.stop] = [False] * length


def _spans_of_calls(bsyms: Sequence[BoundSymbol]) -> set[tuple[int, int]]:
    """Return where calls start and stop, including the unshards that were inserted for a call's first bound symbol."""
    found: dict[ModuleCall, tuple[int, int]] = {}
    start = 0
    for position, bsym in enumerate(bsyms):
        for tag in bsym.tags:
            if isinstance(tag, ModuleCall):
                found[tag] = found.get(tag, (start, 0))[0], position + 1
        if (single := declared(bsym).single) is None or single.reduces:
            start = position + 1
    return set(found.values())


def _read_region(
    bsyms: Sequence[BoundSymbol], start: int, stop: int, last_use: Mapping[str, int], keys: StructuralKeys
) -> tuple[Any, RepeatedRegion | None]:
    """Return the key and the region between two positions; no region unless it has a key and exactly one result."""
    inside = bsyms[start:stop]
    results = [out for bsym in inside for out in defined_by(bsym) if last_use.get(out.name, -1) >= stop]
    structure = keys.of(*inside)
    if structure is None or len(results) != 1 or not isinstance(results[0], TensorProxy):
        return None, None
    defined: set[str] = set()
    inputs: dict[str, None] = {}
    for bsym in inside:
        inputs.update((name, None) for name in args_of(bsym) if name not in defined)
        defined.update(outs_of(bsym))
    numbers = {name: number for number, name in enumerate(structure.proxies)}
    key = structure.key, tuple(map(numbers.__getitem__, inputs)), numbers[results[0].name]
    proxies = tuple(map(structure.proxies.__getitem__, inputs))
    return key, RepeatedRegion(start, stop, structure.parameters, proxies, results[0])
