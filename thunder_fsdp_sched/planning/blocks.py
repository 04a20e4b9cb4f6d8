"""Which blocks of a model, and which of its lines, make the values of a trace."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.inspection import args_of, defined_by, nbytes_of, source_of
from ..ir.operands import bucket_of
from ..ir.schedule import is_communication
from ..ir.symbols import fsdp_wait_params

__all__ = ["Origin", "describe_origins", "origins_of"]

_SHOWN = 3
"""How many ranges of blocks, and how many lines, a description lists."""


class Origin(NamedTuple):
    """Where a value of forward comes from.

    Attributes:
        block: the block of the model, as ``"blocks.3"``; a module outside of any block by its own name; empty if unknown.
        source: the line that made it, as ``"model.py:70"``; empty if none is known.
        nbytes: bytes of its elements.
    """

    block: str
    source: str
    nbytes: int


def origins_of(forward: TraceCtx) -> dict[str, Origin]:
    """Return the origin of each tensor that a forward trace computes, keyed by its name.

    A line of the model belongs to the block whose parameters it reads, and a line that reads none to the block whose
    parameters were read last. So the residual sum at the end of a block belongs to that block, and a norm to the block of
    its weight.

    Args:
        forward: the forward trace of a compiled step.
    """
    blocks: dict[str, str] = {}  # of unsharded parameters, by their names in the trace
    origins: dict[str, Origin] = {}
    last = ""
    pending: list[str] = []  # computed before any parameter is read
    for _, run in itertools.groupby(_compute(forward, blocks), key=_source):
        bsyms = list(run)
        read = [blocks[name] for bsym in bsyms for name in args_of(bsym) if name in blocks]
        last = read[0] if read else last
        for bsym in bsyms:
            for out in defined_by(bsym):
                if isinstance(out, TensorProxy):
                    origins[out.name] = Origin(last, _source(bsym), nbytes_of(out))
                    pending += [] if last else [out.name]
        if last:
            origins.update({name: origins[name]._replace(block=last) for name in pending})
            pending.clear()
    return origins


def _compute(forward: TraceCtx, blocks: dict[str, str]) -> Iterator[BoundSymbol]:
    """Yield the bound symbols that are not communication, and record the block of each parameter before it is read."""
    for bsym in forward.bound_symbols:
        if bsym.sym is fsdp_wait_params:
            params = bucket_of(bsym).spec.params
            blocks.update({out.name: _block(p.name) for out, p in zip(bsym.output, params, strict=True)})
        elif not is_communication(bsym):
            yield bsym


def _block(parameter: str) -> str:
    """Return the path of the block that holds a parameter: up to the first number, else without the parameter's own name."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", parameter)
    return numbered.group() if numbered else parameter.rpartition(".")[0] or parameter


def _source(bsym: BoundSymbol) -> str:
    return source_of(bsym).rpartition("/")[2]


def describe_origins(names: Collection[str], forward: TraceCtx) -> str:
    """Return which blocks and lines make these values: ``"blocks.0-blocks.11 (model.py:28, model.py:31)"``.

    Lines are those that make most bytes.
    """
    origins = origins_of(forward)
    found = [origins[name] for name in names if name in origins]
    ranges = list(_ranges({origin.block for origin in found if origin.block}))
    lines: Counter[str] = Counter()
    for origin in found:
        lines[origin.source] += origin.nbytes
    del lines[""]
    shown = [*ranges[:_SHOWN], *([f"{len(ranges) - _SHOWN} more"] if len(ranges) > _SHOWN else [])]
    sources = [line for line, _ in lines.most_common(_SHOWN)]
    return ", ".join(shown) + (f" ({', '.join(sources)})" if sources else "")


def _ranges(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the blocks, consecutive ones as ``"blocks.0-blocks.11"``."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for block in sorted(blocks):
        prefix, _, number = block.rpartition(".")
        if number.isdecimal():
            numbers[f"{prefix}." if prefix else ""].append(int(number))
        else:
            yield block
    for prefix, found in numbers.items():
        for _, run in itertools.groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0]):
            members = [number for _, number in run]
            first, last = f"{prefix}{members[0]}", f"{prefix}{members[-1]}"
            yield first if first == last else f"{first}-{last}"
