"""Whether a planned step fits into the memory of a device, and what its peak consists of."""

from __future__ import annotations

from ...ir.inspection import is_library
from ...sizes import human_bytes
from ..step_memory.step_memory import StepMemory, optimizer_state_bytes, optimizer_step_bytes
from .blocks import blocks_of
from .dry_run import DryRun


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
    """Return a line of the model as ``"model.py:70"``, ``"the loss"`` for the planner's, ``""`` for a library's."""
    file = source.rpartition(":")[0]
    if file.endswith("planning/models.py"):
        return "the loss"
    return "" if is_library(file) else source.rpartition("/")[2]
