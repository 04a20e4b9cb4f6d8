"""Whether a planned step fits into the memory of a device, and what its peak consists of."""

from __future__ import annotations

import itertools
import re

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.inspection import args_of, defined_by, is_library, source_of
from ...sizes import human_bytes
from ..step_memory.rows import StepRows
from ..step_memory.step_memory import StepMemory, optimizer_state_bytes, optimizer_step_bytes
from .dry_run import DryRun


def blocks_of(step: StepRows) -> dict[str, str]:
    """Return the block of the model that computes each tensor of forward, by the tensor's name.

    A block has a path such as ``"blocks.3"``; a module outside of any block has its own name.
    A line of the model belongs to the block whose parameters it reads, and a line that reads none to the block whose
    parameters were read last. So the residual sum at the end of a block belongs to that block, and a norm to the block of
    its weight.
    """
    of_params: dict[str, str] = {}  # by the names of unsharded parameters in the trace
    found: dict[str, str] = {}
    last = ""
    computing: list[BoundSymbol] = []
    for row in step.rows[: step.rows_of_forward]:
        e = row.effects
        if e.unshards and e.bucket is not None:
            of_params.update({out: block_of(p.name) for out, p in zip(e.in_place, e.bucket.spec.params, strict=True)})
        elif not e.in_schedule:
            computing.append(row.bsym)
    for _, line in itertools.groupby(computing, key=lambda bsym: source_of(bsym).rpartition("/")[2]):
        bsyms = list(line)
        block = next((of_params[name] for bsym in bsyms for name in args_of(bsym) if name in of_params), last)
        if block and not last:  # what precedes the first read of a parameter belongs to its block, too
            found = dict.fromkeys(found, block)
        last = block
        outs = [out for bsym in bsyms for out in defined_by(bsym) if isinstance(out, TensorProxy)]
        found.update({out.name: block for out in outs})
    return found


def block_of(parameter: str) -> str:
    """Return the path of the block that holds a parameter: up to the first number, else without the parameter's own name."""
    numbered = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", parameter)
    return numbered.group() if numbered else parameter.rpartition(".")[0] or parameter


def with_optimizer(step: DryRun, state: float | None = None, allocated: float | None = None) -> StepMemory:
    """Return the memory of a planned step with its optimizer; in a window, of the micro-batch that needs most.

    Args:
        state: bytes of state for each element that trains, by default those of AdamW.
        allocated: bytes that ``optimizer.step`` allocates for each of them, by default those of AdamW as torch runs it on
            the devices of the cluster.
    """
    buckets = step.compiled.buckets
    nbytes = optimizer_state_bytes(buckets, state)
    *earlier, last = (row.memory for row in step.rows)
    updates = step.compiled.backward is not None
    foreach = not step.cluster.synchronous
    step_bytes = optimizer_step_bytes(buckets, allocated, foreach=foreach) if updates else 0
    memories = [*(m.with_optimizer_state(nbytes) for m in earlier), last.with_optimizer_state(nbytes, step_bytes)]
    return max(memories, key=lambda memory: memory.peak.nbytes)


def describe_fit(memory: StepMemory, device_bytes: int, device: str) -> str:
    """Return lines that say whether a step fits, by how much, what its peak consists of, and its largest tensors.

    Args:
        memory: the memory of the step, optimizer state included.
        device_bytes: bytes of the device's memory.
        device: the name of the device.
    """
    peak = memory.peak
    free = device_bytes - peak.nbytes
    verdict = (
        f"fits on {device}: {human_bytes(free, 4)} free"
        if free >= 0
        else f"does not fit on {device}: {human_bytes(-free, 4)} too much"
    )
    blocks = blocks_of(memory.step)
    made_by = {
        t: "".join(f", {text}" for text in (blocks.get(t.name, ""), _line_of(t.source)) if text) for t in peak.largest
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
    if file.endswith("planning/models.py"):
        return "the loss"
    return "" if is_library(file) else source.rpartition("/")[2]
