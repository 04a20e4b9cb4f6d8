"""The demo's checks: compare promises with measurements and with the traces that ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thunder.core.trace import TraceCtx

from ..ir.symbols import issues_collective
from ..plan.plan import Plan
from ..reports.report import human_bytes
from ..testing import (
    assert_gathers_in_consumer_order,
    assert_prefetch_distance,
    assert_reductions_right_after_last_gradient,
    assert_unsharded_bytes_at_most,
    assert_waits_right_before_first_consumer,
)
from .options import DemoOptions
from .training import Run, largest_difference, largest_loss_difference

__all__ = ["Check", "check_run"]


@dataclass(frozen=True)
class Check:
    """A promise, whether it was kept, and the evidence."""

    run: str
    promise: str
    passed: bool
    found: str


def check_run(run: Run, strategy: str, unsharded: Run, stock: Run, options: DemoOptions) -> list[Check]:
    """Check a run of this package.

    Args:
        strategy: ``"zero2"`` or ``"zero3"``.
        unsharded: the unsharded run, which it must equal.
        stock: the run of Thunder's own ``fsdp``, which it must equal bit for bit with two ranks (their sum has only one
            order).
    """
    checks = []

    def check(promise: str, passed: bool, found: str) -> None:
        checks.append(Check(run.name, promise, passed, found))

    loss = largest_loss_difference(run.losses, unsharded.losses)
    check(
        f"losses equal the unsharded run's within {options.loss_tolerance:g}",
        loss <= options.loss_tolerance,
        f"{loss:.2g}",
    )
    difference = largest_difference(run.parameters, unsharded.parameters)
    check(
        f"parameters equal the unsharded run's within {options.parameter_tolerance:g} after {options.steps} AdamW steps",
        difference <= options.parameter_tolerance,
        f"{difference:.2g}",
    )
    if options.world_size == 2:
        difference = largest_difference(run.parameters, stock.parameters)
        check("parameters equal those of Thunder's own fsdp bit for bit", difference == 0, f"{difference:.2g}")
    check("the model learns: the last loss is below the first", run.losses[-1] < run.losses[0], _arrow(run.losses))

    assert run.plan is not None
    counts = run.counts
    check(
        "no parameter bytes are copied", counts.parameter_bytes_copied == 0, human_bytes(counts.parameter_bytes_copied)
    )
    check(
        "a step allocates no memory for unsharded parameters",
        counts.unsharded_bytes_allocated == 0,
        human_bytes(counts.unsharded_bytes_allocated),
    )
    check("every rank issues the same collectives in the same order", run.alike, f"{len(counts.collectives)} a rank")
    planned = sum(issues_collective(bsym) for trace in _traces(run) for bsym in trace.bound_symbols)
    check(
        "the step issues as many collectives as its traces",
        planned == len(counts.collectives),
        f"{len(counts.collectives)} of {planned}",
    )
    for promise, assertion in _orders(strategy, options, run.plan).items():
        fault = _first_fault(assertion, _traces(run))
        check(promise, fault is None, fault or "forward and backward")
    if strategy == "zero3":
        _check_peaks(run, options, check)
    else:
        gathers = sum(c.kind == "all_gather" for c in counts.collectives if c.phase == "backward")
        check("backward gathers nothing", gathers == 0, f"{gathers} all-gathers")
    return checks


def _orders(strategy: str, options: DemoOptions, plan: Plan) -> dict[str, Callable[[TraceCtx], None]]:
    orders: dict[str, Callable[[TraceCtx], None]] = {
        "every wait stands right before its first consumer": assert_waits_right_before_first_consumer,
        "all-gathers are issued in the order of their first consumers": assert_gathers_in_consumer_order,
        f"an all-gather is issued {options.prefetch} ahead of its own wait": lambda trace: assert_prefetch_distance(
            trace, options.prefetch
        ),
        "every reduce-scatter is issued right after its last gradient": assert_reductions_right_after_last_gradient,
    }
    if strategy == "zero3":
        blocks, nbytes = _most_unsharded(options, plan)
        orders[f"the traces keep at most {blocks} blocks unsharded"] = lambda trace: assert_unsharded_bytes_at_most(
            trace, nbytes
        )
    return orders


def _check_peaks(run: Run, options: DemoOptions, check: Callable[[str, bool, str], None]) -> None:
    assert run.plan is not None
    blocks, allowed = _most_unsharded(options, run.plan)
    for phase in ("forward", "backward"):
        peak = run.counts.peak_unsharded_bytes[phase]
        check(
            f"{phase} holds at most {blocks} blocks of unsharded parameters ({human_bytes(allowed)})",
            0 < peak <= allowed,
            human_bytes(peak),
        )


def _most_unsharded(options: DemoOptions, plan: Plan) -> tuple[float, int]:
    """Return the blocks and bytes that ZeRO-3 may hold: ``prefetch + 1`` blocks, and 10 % for norms and padding."""
    blocks = options.prefetch + 1.1
    return blocks, int(blocks * max(b.unsharded_bytes for b in plan))


def _traces(run: Run) -> list[TraceCtx]:
    assert run.traces is not None and run.traces.forward is not None and run.traces.backward is not None
    return [run.traces.forward, run.traces.backward]


def _first_fault(assertion: Callable[[TraceCtx], None], traces: list[TraceCtx]) -> str | None:
    for trace in traces:
        try:
            assertion(trace)
        except AssertionError as error:
            return str(error)
    return None


def _arrow(losses: list[float]) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}"
