"""Loops in which ranks run out of data at different times: a rank without a batch takes part in the others' collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from thunder.distributed import get_skip_data_parallel_grad_sync

from ...errors import coded_error
from ...ir.calls import NO_CALL
from ...ranks.control import Control
from ...ranks.rounds import after_surplus
from ...runtime.ops import backward_done
from ...sharding.sharded_module import find_sharding
from ...transform import Compilation, FSDPTransform
from ..no_sync import reduce_unreduced
from .follow_order import empty_trace
from .programs import Program
from .start import DifferingStart, Maker

Batch = TypeVar("Batch")

_ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)


def batches(model: torch.nn.Module, loader: Iterable[Batch]) -> Iterator[Batch | None]:
    """Yield the batches of this rank's loader, and then ``None`` until the loaders of all ranks have ended.

    So all ranks make the same number of steps. In a step without a batch, :func:`without_batch` takes the place of the
    model; everything else (clipping, optimizer, scheduler) is the same code on all ranks::

        for batch in batches(model, loader):
            loss = without_batch(model) if batch is None else loss_of(model(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Gradients are divided by the number of all ranks, even in steps in which some have no batch. A batch may be anything
    but ``None``. All ranks must leave the loop in the same step, or run it to its end.

    Each step takes a round of agreement. If the loader raises an error, all ranks raise one in this step.

    Args:
        model: a jitted module with ``fsdp(ranks_may_differ=True)``.
        loader: the batches of this rank, any number of them.

    Raises:
        ValueError: ``fsdp`` has other options, the loader has no end, or a batch is ``None``.
        ScheduleDisagreement: a rank does something else, or its loader has raised an error.
    """
    return _batches(_may_differ("batches", model).sharded.control, loader)


def _batches(control: Control, loader: Iterable[Batch]) -> Iterator[Batch | None]:
    iterator: Iterator[Batch] | None = None
    has_ended = False
    while True:
        batch, error = None, None
        try:
            if iterator is None:
                iterator = _finite(loader)
            batch = None if has_ended else next(iterator)
            if batch is None and not has_ended:
                raise coded_error(ValueError, "batches.batch-is-none")
        except StopIteration:
            has_ended = True
        except Exception as raised:
            error = raised
        step = f"the next step of batches(...){after_surplus(control.issue_counts.surplus_issues)}"
        control.report(step, error, digest=int(has_ended))
        if has_ended and (control.is_alike):
            return  # all ranks have ended
        yield batch


def _finite(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Return an iterator over the batches of ``loader``."""
    if isinstance(loader, _ENDLESS):
        raise coded_error(ValueError, "batches.loader-without-end", loader=loader)
    return iter(loader)


def without_batch(model: torch.nn.Module) -> torch.Tensor:
    """Take part in the forward of the ranks that have a batch, in place of ``model(batch)``, and return a loss of 0.

    Its ``backward()`` takes part in theirs: afterwards the gradients of this rank are those of all ranks. It stands for one
    forward, and one backward if gradients are enabled, in the same mode as on the other ranks: under ``no_sync`` or not,
    ``model.train()`` or ``model.eval()``, with or without ``torch.no_grad()``. A rank without a batch computes nothing,
    and holds a bucket or two in memory, as one layer of a step does.

    Args:
        model: a jitted module with ``fsdp(ranks_may_differ=True)``.

    Returns:
        A tensor without dimensions, on the device of the parameters; it requires gradients if they are enabled.

    Raises:
        ValueError: ``fsdp`` has other options.
        ScheduleDisagreement: the other ranks are in another mode or do something else.
    """
    transform = _may_differ("without_batch", model)
    with transform.sharded.control.announcing_failure("starting a call"):
        transform.sharded.check_ready()
    buckets = transform.sharded.buckets
    trains = torch.is_grad_enabled() and any(p.requires_grad for bucket in buckets for p in bucket.params)
    mode = get_skip_data_parallel_grad_sync(), trains
    _run(transform, ("forward", *mode))
    zero = torch.zeros((), device=buckets[0].spec.device)
    if not trains:
        return zero
    return _TakesPart.apply(zero.requires_grad_(), transform, ("backward", *mode))


class _TakesPart(torch.autograd.Function):
    """Autograd's node of a rank without a batch."""

    @staticmethod
    def forward(ctx: Any, zero: torch.Tensor, transform: FSDPTransform, kind: tuple[Any, ...]) -> torch.Tensor:
        ctx.transform, ctx.kind = transform, kind
        ctx.save_for_backward(zero)
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _ = ctx.saved_tensors  # raises an error in a second backward, as a loss does
        _run(ctx.transform, ctx.kind)
        return grad, None, None


@torch.no_grad()
def _run(transform: FSDPTransform, kind: tuple[Any, ...]) -> None:
    """Take part in one trace of the other ranks."""
    control = transform.sharded.control
    if control.is_single_rank:
        half, no_sync, _ = kind
        if half == "backward" and not no_sync:
            for bucket in transform.sharded.buckets:
                reduce_unreduced(bucket)
            backward_done(no_sync, *transform.sharded.buckets)
        return
    starts: dict[tuple[Any, ...], DifferingStart] = transform.sharded.attached.setdefault("starts without batch", {})
    if kind not in starts:
        starts[kind] = _start_without_batch(transform, kind)
    start = starts[kind]
    start.text = _text(kind, training=transform.sharded.module.training)
    start.post()
    if (take_part := start.settled_or_merged()) is not None:
        take_part()
    else:
        start.end_audit()


def _start_without_batch(transform: FSDPTransform, kind: tuple[Any, ...]) -> DifferingStart:
    half, no_sync, trains = kind
    name, text = f"{half}_without_batch", _text(kind, training=transform.sharded.module.training)
    context = Compilation(transform, NO_CALL, no_sync=no_sync).context
    context.trains = trains
    make = Maker(transform, context, empty_trace(f"serve_in_{half}", backward=half == "backward"))
    return DifferingStart(transform.sharded, name, kind, text, Program(), (), make)


def _text(kind: tuple[Any, ...], *, training: bool) -> str:
    half, no_sync, trains = kind
    mode = "gradients enabled" if trains else "no gradients", "training" if training else "evaluating"
    return f"{half} without a batch ({', '.join(mode)}{', no_sync' * no_sync})"


def _may_differ(function: str, model: torch.nn.Module) -> FSDPTransform:
    transform = find_sharding(model)
    assert isinstance(transform, FSDPTransform)
    if not transform.options.ranks_may_differ:
        raise coded_error(ValueError, "batches.ranks-may-not-differ", function=function)
    return transform
