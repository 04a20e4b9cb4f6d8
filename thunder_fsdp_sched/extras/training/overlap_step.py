"""Step an optimizer on the gradients that have arrived while the last reductions of backward are in flight.

[Note: Steps in the order of arrival]
A step of torch's own optimizers runs on a stand-in with other parameter groups: see [Note: Steps on plain rows] in
``sharding.plain_steps``. These optimizers treat each element by itself, so groups may be cut into pieces without changing a
bit, and they step on one group after the other. So the stand-in has groups that are cut by reduction, in the order in which
the reductions were issued, and iterating over them waits: a piece is stepped on while later ones are in flight.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...runtime.bucket import Bucket
from ...sharding.plain_steps import CUT, PlainGradient, is_elementwise, with_gradients
from ...sharding.sharded_module import find_sharding
from ...transform import FSDPTransform
from .early_gathers import EarlyGathers, EarlyStep
from .late_gradients import Deferral, late_of


def overlap_step(
    model: ThunderModule,
    optimizer: torch.optim.Optimizer,
    *,
    gather_early: bool = False,
    free_gradients: bool = False,
) -> None:
    """Overlap the last reductions of each backward with the optimizer's step on the gradients that have arrived.

    Backward then returns before these reductions have finished. Reading a gradient waits for its reduction, and the
    optimizer begins with those that have arrived. Results are the same, bit for bit. If something reads all gradients
    before the step, such as clipping by the global norm, ``GradScaler``, hooks of the optimizer or a closure, it waits
    for all reductions, and nothing overlaps. Steps of a copy of the optimizer do not overlap.

    With ``gather_early``, the first gathers of the next forward begin in the step, too. If a parameter changes after
    the step, or an evaluation runs before that forward, the affected buckets are gathered again. Call it on all ranks,
    before the first forward; from then on every step must be made on all ranks. Without ``gather_early``, the
    collectives do not change, and each rank may decide alone. A later call replaces the arguments; it must be made on
    all ranks if it changes ``gather_early``.

    Args:
        model: the result of ``thunder.jit(module, transforms=[fsdp(...)])``.
        optimizer: one of torch's optimizers that treat each element by itself, with parameters of the model.
        gather_early: whether steps begin the first gathers of the next forward. It costs a round of agreement a step.
            An optimizer may do so for several models, with a call for each.
        free_gradients: step on one bucket after the other, and set ``.grad`` of its parameters to ``None`` right after. If
            nothing overlaps, ``.grad`` of all parameters of the optimizer becomes ``None`` at the end of the step.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: the optimizer needs the gradients of all parameters at once, its class is not one of torch's, or it has
            no parameter of the model; or the model's options do not allow ``gather_early``.
        RuntimeError: ``gather_early`` comes after the first forward.
        ScheduleDisagreement: other ranks do something else (``gather_early``).
    """
    if not is_elementwise(optimizer):
        raise coded_error(ValueError, "optimizer.cannot-overlap", optimizer=type(optimizer).__name__)
    transform = cast(FSDPTransform, find_sharding(model))
    of_model = set(map(id, model.parameters()))
    if not any(id(param) in of_model for group in optimizer.param_groups for param in group["params"]):
        raise coded_error(ValueError, "optimizer.has-no-parameter-of-model", optimizer=type(optimizer).__name__)
    buckets = transform.sharded.buckets
    deferral = next((bucket.defer for bucket in buckets), None) or Deferral()
    known: EarlyGathers | None = next((bucket.early for bucket in buckets), None)
    early = _early_gathers(transform, known) if gather_early else None
    for bucket in buckets:
        bucket.defer, bucket.early = deferral, known or early
    steps: _Steps | None = getattr(optimizer, CUT, None)
    if steps is None:
        setattr(optimizer, CUT, steps := _Steps())
        optimizer.register_step_post_hook(steps.end)
    steps.frees_gradients = free_gradients
    others = [reference for reference in steps.early if reference() not in (None, known)]  # of other models
    steps.early = others if early is None else [*others, weakref.ref(early)]


def _early_gathers(transform: FSDPTransform, known: EarlyGathers | None) -> EarlyGathers | None:
    """Return the object with which steps begin gathers, a collective; ``None`` if there are no other ranks."""
    options, control = transform.options, transform.sharded.control
    conflicts = {
        "agree": options.agree != "step",
        "ranks_may_differ": options.ranks_may_differ,
        "Sharding(release=True)": options.sharding_strategy.release,
        "Sharding(reshard_after_backward=True)": options.sharding_strategy.reshard_after_backward,
    }
    if conflict := next((name for name, conflicts in conflicts.items() if conflicts), None):
        raise coded_error(ValueError, "optimizer.cannot-gather-early", option=conflict)
    if transform.compiled and known is None and not control.is_single_rank:
        raise coded_error(RuntimeError, "optimizer.gather-early-after-forward")
    control.rendezvous("overlap_step", "with gather_early=True")
    return known if known is not None or control.is_single_rank else EarlyGathers(control)


class _Steps:
    """The steps of one optimizer.

    Attributes:
        frees_gradients: whether to step on each bucket alone, and to drop its gradients after that.
        early: the early gathers of each model for which steps begin some.
    """

    def __init__(self) -> None:
        self.frees_gradients = False
        self.early: list[weakref.ref[EarlyGathers]] = []

    def __call__(self, groups: Sequence[dict[str, Any]], gradients: list[PlainGradient]) -> Sequence[dict[str, Any]]:
        """Return the groups of plain rows of a step, cut if torch does not read all of them before it steps on one."""
        if any(group.get("capturable") for group in groups):
            return with_gradients(groups, gradients)
        return cast(Sequence[dict[str, Any]], _StepPieces(self, groups, gradients))

    def begin(self, params: Sequence[torch.Tensor]) -> list[EarlyStep]:
        """Announce a step on these parameters to the other ranks, if it gathers."""
        return [early.begin(params) for reference in self.early if (early := reference()) is not None]

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """After a step that was not made in pieces, gather early and drop gradients, as pieces do."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for step in () if isinstance(args[0].param_groups, _StepPieces) else self.begin(params):
            step.stepped(params)
        for param in params if self.frees_gradients else ():
            param.grad = None


class StepPiece:
    """The parameters of one bucket whose gradients one reduction has computed.

    Args:
        late: the number of that reduction, larger than those of earlier ones; ``None`` if it has arrived.
        bucket: the bucket.
    """

    def __init__(self, late: int | None, bucket: Bucket | None) -> None:
        self.late, self.bucket = late, bucket
        self.gradients: list[PlainGradient] = []
        self.groups: dict[int, list[torch.Tensor]] = defaultdict(list)  # plain rows, by the index of their group

    def free(self) -> None:
        """Drop the gradients."""
        for plain, param, _ in self.gradients:
            plain.grad = param.grad = None
        self.gradients.clear()


def in_order(pieces: Iterable[StepPiece], gathered: Collection[Bucket]) -> list[list[StepPiece]]:
    """Return the pieces in the order of steps, as lists that are stepped on together.

    Late pieces come in the order of their reductions. If the step gathers, the pieces of the gathered buckets come as
    early as possible, and others come last to hide the gathers: all others that have arrived, or half of them if some
    are late.
    """
    arrived: list[StepPiece] = []
    late: list[StepPiece] = []
    for piece in pieces:
        (arrived if piece.late is None else late).append(piece)
    late.sort(key=attrgetter("late"))
    last = [piece for piece in arrived if gathered and piece.bucket not in gathered]
    if late:
        last = last[: len(last) // 2]
    return [[piece for piece in arrived if piece not in last], *([piece] for piece in late), last]


class _StepPieces:
    """The parameter groups of one step, cut by reduction: see [Note: Steps in the order of arrival].

    Args:
        steps: the steps of the optimizer.
        groups: the groups, with plain rows as parameters.
        gradients: the gradients of sharded parameters. The list is emptied, so that nothing else keeps them alive.
    """

    def __init__(self, steps: _Steps, groups: Sequence[dict[str, Any]], gradients: list[PlainGradient]) -> None:
        self._groups, self._frees = groups, steps.frees_gradients
        self._early = steps.begin([param for _, param, _ in gradients])
        pieces: dict[tuple[int | None, Bucket | None], StepPiece] = {}
        piece_of: dict[torch.Tensor, StepPiece] = {}
        for plain, param, grad in gradients:
            found, late = param.rows.in_bucket, late_of(grad)
            key = None if late is None else late.number, None if found is None else found[0]
            piece_of[plain] = piece = pieces.setdefault(key, StepPiece(*key))
            piece.gradients.append((plain, param, grad))
        gradients.clear()
        others = pieces.setdefault((None, None), StepPiece(None, None))  # not sharded, or without a gradient
        for index, group in enumerate(groups):
            for plain in group["params"]:
                piece_of.get(plain, others).groups[index].append(plain)
        parts = in_order(pieces.values(), {bucket for step in self._early for bucket in step.buckets})
        self._parts = [[piece] for part in parts for piece in part] if self._frees else parts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            for piece in part:
                with_gradients((), piece.gradients)
            for index, group in enumerate(self._groups):
                if params := [plain for piece in part for plain in piece.groups[index]]:
                    yield {**group, "params": params}
            for step in self._early:
                step.stepped(param for piece in part for _, param, _ in piece.gradients)
            for piece in part if self._frees else ():
                piece.free()
