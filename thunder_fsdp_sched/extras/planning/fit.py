"""Whether a step fits into the memory of a device, what its peak consists of, and which blocks make its values."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.effects import effects
from ...ir.inspection import args_of, defined_by, is_library, nbytes_of, source_of
from ...ir.read_schedule import is_communication
from ...runtime.bucket import Bucket
from ...sizes import human_bytes
from ..step_memory.step_memory import StepMemory

_SHOWN = 3
"""How many ranges of blocks, and how many lines, a description lists."""


def optimizer_state_bytes(buckets: Iterable[Bucket], per_element: float | None = None) -> int:
    """Return the bytes of optimizer state on this rank's device.

    The state of shards that ``CPUOffloadPolicy`` keeps on the host is there, too, so it does not count.

    Args:
        per_element: bytes for each element that trains. By default those of Adam and AdamW: two values in the dtype of
            the shards.
    """
    shards = [b.shard for b in buckets if b.spec.requires_grad and not b.spec.comm.offload]
    return sum(2 * s.nbytes if per_element is None else int(per_element * s.numel()) for s in shards)


def describe_fit(memory: StepMemory, device_bytes: int, device: str, forward: TraceCtx | None = None) -> str:
    """Return lines that say whether a step fits, by how much, what its peak consists of, and its largest tensors.

    Args:
        memory: the memory of the step, optimizer state included.
        device_bytes: bytes of the device's memory.
        device: the name of the device.
        forward: the forward trace, which tells the blocks of the largest tensors.
    """
    peak = memory.peak
    free = device_bytes - peak.nbytes
    verdict = (
        f"fits on {device}: {human_bytes(free, 4)} free"
        if free >= 0
        else f"does not fit on {device}: {human_bytes(-free, 4)} too much"
    )
    origins = {} if forward is None else origins_of(forward)
    made_by = {
        t: "".join(f", {text}" for text in (getattr(origins.get(t.name), "block", ""), _line_of(t.source)) if text)
        for t in peak.largest
    }
    lines = [
        f"{verdict} of {human_bytes(device_bytes, 4)}",
        f"peak {human_bytes(peak.nbytes, 4)} in {peak.phase}, at position {peak.position}:",
        *(f"  {human_bytes(nbytes, 4):>10}  {kind}" for kind, nbytes in peak.by_kind.items() if nbytes),
        "largest tensors there, with the blocks and lines of the model that made them:",
        *(f"  {human_bytes(t.nbytes, 4):>10}  {t.name}, {t.kind}{made_at}" for t, made_at in made_by.items()),
    ]
    return "\n".join(lines)


def _line_of(source: str) -> str:
    """Return a line of the model as ``"model.py:70"``; nothing for one of torch, and the planner's loss by that name."""
    file = source.rpartition(":")[0]
    if file.endswith("planning/dry_run.py"):
        return "the loss"
    return "" if is_library(file) else source.rpartition("/")[2]


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
    computing: list[BoundSymbol] = []
    for bsym in forward.bound_symbols:
        e = effects(bsym)
        if e.unshards and e.bucket is not None:
            blocks.update({out: block_of(p.name) for out, p in zip(e.in_place, e.bucket.spec.params, strict=True)})
        elif not is_communication(bsym):
            computing.append(bsym)
    for source, run in itertools.groupby(computing, key=lambda bsym: source_of(bsym).rpartition("/")[2]):
        bsyms = list(run)
        found = next((blocks[name] for bsym in bsyms for name in args_of(bsym) if name in blocks), last)
        if found and not last:  # what precedes the first read of a parameter belongs to its block, too
            origins = {name: origin._replace(block=found) for name, origin in origins.items()}
        last = found
        outs = [out for bsym in bsyms for out in defined_by(bsym) if isinstance(out, TensorProxy)]
        origins.update({out.name: Origin(last, source, nbytes_of(out)) for out in outs})
    return origins


def block_of(parameter: str) -> str:
    """Return the path of the block that holds a parameter: up to the first number, else without the parameter's own name."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", parameter)
    return numbered.group() if numbered else parameter.rpartition(".")[0] or parameter


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


def _ranges(blocks: set[str]) -> Iterator[str]:
    """Yield the blocks, consecutive ones as ``"blocks.0-blocks.11"``."""
    parts = [(block, *block.rpartition(".")) for block in blocks]
    numbered = sorted((prefix, int(number), block) for block, prefix, _, number in parts if number.isdecimal())
    yield from sorted(blocks.difference(block for _, _, block in numbered))
    for _, run in itertools.groupby(enumerate(numbered), key=lambda pair: (pair[1][0], pair[1][1] - pair[0])):
        members = [block for _, (_, _, block) in run]
        yield members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}"
