"""Regions of a trace that modules have added, and which of them repeat.

[Note: Regions]
When a module is called, the bound symbols that it adds to the trace get a common tag (``ModuleCall``), and so do the copies
that repeat a recorded call. Tags survive the passes that copy bound symbols. ``differentiate`` compares the structures of
tagged regions, because a pass in between may have changed one of them, but it does not search the trace for repetition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.inspection import args_of, defined_by, outs_of
from ..ir.symbols import fsdp_unshard
from .bound_symbols import ModuleCall, Parameter, StructuralKeys


class Region(NamedTuple):
    """The bound symbols of one module call, of which later bound symbols read one result.

    Attributes:
        start, stop: the positions of the first bound symbol, and of the one after the last.
        parameters: those that are unsharded, in order of appearance.
        inputs: the proxies that it reads and does not define.
        output: the result.
    """

    start: int
    stop: int
    parameters: tuple[Parameter, ...]
    inputs: tuple[Proxy, ...]
    output: TensorProxy


def tag_call(bsyms: Iterable[BoundSymbol]) -> None:
    """Tag the bound symbols that a module call has added."""
    call = ModuleCall()
    for bsym in bsyms:
        bsym.tags.add(call)


def renew_calls(bsyms: Iterable[BoundSymbol]) -> None:
    """Give copies of the bound symbols of module calls the tags of calls of their own."""
    renewed: dict[Any, ModuleCall] = defaultdict(ModuleCall)
    for bsym in bsyms:
        bsym.tags = {renewed[tag] if isinstance(tag, ModuleCall) else tag for tag in bsym.tags}


def find_repeated_regions(
    bsyms: Sequence[BoundSymbol], last_use: Mapping[str, int], may_repeat: Callable[[BoundSymbol], bool]
) -> Iterator[list[Region]]:
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
        alike: dict[Any, list[Region]] = defaultdict(list)
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
    """Return where calls start and stop, with the unshards that were inserted for the first bound symbol of a call."""
    found: dict[ModuleCall, tuple[int, int]] = {}
    start = 0
    for position, bsym in enumerate(bsyms):
        for tag in bsym.tags:
            if isinstance(tag, ModuleCall):
                found[tag] = found.get(tag, (start, 0))[0], position + 1
        if bsym.sym is not fsdp_unshard:
            start = position + 1
    return set(found.values())


def _read_region(
    bsyms: Sequence[BoundSymbol], start: int, stop: int, last_use: Mapping[str, int], keys: StructuralKeys
) -> tuple[Any, Region | None]:
    """Return the key and the region between two positions; no region if it has another number of results than one."""
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
    return key, Region(start, stop, structure.parameters, proxies, results[0])
