"""The demo's checks: compare promises with measurements and with the traces that ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from thunder.core.trace import TraceCtx

from ..ir.effects import sends
from ..reports.report import human_bytes
from ..testing import (
    assert_gathers_in_consumer_order,
    assert_prefetch_distance,
    assert_reductions_right_after_last_gradient,
    assert_unsharded_bytes_at_most,
    assert_waits_right_before_first_consumer,
)
from .runs import DemoOptions, Run, largest_difference, largest_loss_difference


class Check(NamedTuple):
    """A promise, whether it was kept, and the evidence."""

    promise: str
    passed: bool
    found: str


def check_run(run: Run, strategy: str, unsharded: Run, stock: Run, options: DemoOptions) -> Iterator[Check]:
    """Check a run of this package.

    Args:
        strategy: ``"zero2"`` or ``"zero3"``.
        unsharded: the unsharded run, which it must equal.
        stock: the run of Thunder's own ``fsdp``, which it must equal bit for bit with two ranks (their sum has only one
            order).
    """
    of_loss, of_parameters = options.tolerances
    difference = largest_loss_difference(run.losses, unsharded.losses)
    yield Check(f"losses equal the unsharded run's within {of_loss:g}", difference <= of_loss, f"{difference:.2g}")
    difference = largest_difference(run.parameters, unsharded.parameters)
    promise = f"parameters equal the unsharded run's within {of_parameters:g} after {options.steps} AdamW steps"
    yield Check(promise, difference <= of_parameters, f"{difference:.2g}")
    if options.world_size == 2:
        difference = largest_difference(run.parameters, stock.parameters)
        promise = "parameters equal those of Thunder's own fsdp bit for bit"
        yield Check(promise, difference == 0, f"{difference:.2g}")
    first, last = run.losses[0], run.losses[-1]
    yield Check("the model learns: the last loss is below the first", last < first, f"{first:.3f} -> {last:.3f}")

    counts = run.counts
    for promise, nbytes in (
        ("no parameter bytes are copied", counts.parameter_bytes_copied),
        ("a step allocates no memory for unsharded parameters", counts.unsharded_bytes_allocated),
    ):
        yield Check(promise, nbytes == 0, human_bytes(nbytes))
    issued = len(counts.collectives)
    yield Check("every rank issues the same collectives in the same order", run.alike, f"{issued} a rank")
    planned = sum(sends(bsym) is not None for trace in _traces(run) for bsym in trace.bound_symbols)
    promise = "the step issues as many collectives as its traces"
    yield Check(promise, planned == issued, f"{issued} of {planned}")

    orders: dict[str, Callable[[TraceCtx], None]] = {
        "every wait stands right before its first consumer": assert_waits_right_before_first_consumer,
        "all-gathers are issued in the order of their first consumers": assert_gathers_in_consumer_order,
        f"an all-gather is issued {options.prefetch} ahead of its own wait": partial(
            assert_prefetch_distance, prefetch=options.prefetch
        ),
        "every reduce-scatter is issued right after its last gradient": assert_reductions_right_after_last_gradient,
    }
    if strategy == "zero2":
        gathers = sum(c.kind == "all_gather" for c in counts.collectives if c.phase == "backward")
        yield Check("backward gathers nothing", gathers == 0, f"{gathers} all-gathers")
    else:
        assert run.plan is not None
        blocks = options.prefetch + 1.1  # 10 % for norms and padding
        allowed = int(blocks * max(bucket.unsharded_bytes for bucket in run.plan))
        promise = f"the traces keep at most {blocks} blocks unsharded"
        orders[promise] = partial(assert_unsharded_bytes_at_most, nbytes=allowed)
        for phase in ("forward", "backward"):
            peak = counts.peak_unsharded_bytes[phase]
            promise = f"{phase} holds at most {blocks} blocks of unsharded parameters ({human_bytes(allowed)})"
            yield Check(promise, 0 < peak <= allowed, human_bytes(peak))
    for promise, assertion in orders.items():
        try:
            for trace in _traces(run):
                assertion(trace)
        except AssertionError as error:
            yield Check(promise, False, str(error))
        else:
            yield Check(promise, True, "forward and backward")


def _traces(run: Run) -> list[TraceCtx]:
    assert run.traces is not None and run.traces.forward is not None and run.traces.backward is not None
    return [run.traces.forward, run.traces.backward]
