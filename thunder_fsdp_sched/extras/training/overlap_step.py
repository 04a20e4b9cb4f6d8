"""Step an optimizer on the gradients that have arrived while the last reductions of backward are in flight.

[Note: Steps in the order of arrival]
A step of torch's own optimizers runs on a stand-in with other parameter groups: see [Note: Steps on plain rows] in
``sharding.plain_steps``. These optimizers treat each element by itself, so groups may be cut into pieces without changing a
bit, and they step on one group after the other. So the stand-in has groups that are cut by reduction, in the order in which
the reductions were issued, and iterating over them waits: a piece is stepped on while later ones are in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...sharding.plain_steps import CUT, PlainGradient, is_elementwise
from ...sharding.sharded_module import find_jitted
from .late_gradients import Deferral, late_of


def overlap_step(model: ThunderModule, optimizer: torch.optim.Optimizer, *, free_gradients: bool = False) -> None:
    """Let the last reductions of each backward end while the optimizer steps on the gradients that have arrived.

    Backward then returns before they have ended. Reading a gradient waits for its reduction, and the optimizer begins with
    those that have arrived. The numbers are the same, to the bit. What reads all gradients before the step, such as clipping
    by the global norm, ``GradScaler``, hooks of the optimizer or a closure, waits for all of them, so that nothing overlaps.

    Each rank may decide alone whether to call it, because it changes nothing that is sent. Call it once, before training.

    Args:
        model: the result of ``thunder.jit(module, transforms=[fsdp(...)])``.
        optimizer: one of torch's optimizers that treat each element by itself, with parameters of the model.
        free_gradients: step on one bucket after the other, and set ``.grad`` of its parameters to ``None`` right after.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: the optimizer needs the gradients of all parameters at once, or its class is not one of torch's.
    """
    if not is_elementwise(optimizer):
        raise coded_error(ValueError, "optimizer.cannot-overlap", optimizer=type(optimizer).__name__)
    _, sharded = find_jitted(model)
    deferral = next((bucket.defer for bucket in sharded.buckets if bucket.defer is not None), None) or Deferral()
    for bucket in sharded.buckets:
        bucket.defer = deferral

    setattr(optimizer, CUT, partial(_Pieces, free_gradients=free_gradients))


class _Piece:
    """The parameters whose gradients one reduction has computed, or all that have arrived."""

    def __init__(self) -> None:
        self.gradients: list[PlainGradient] = []
        self.groups: dict[int, list[torch.Tensor]] = defaultdict(list)  # plain rows, by the index of their group

    def arrive(self) -> None:
        """Wait for the gradients and give them to the plain rows."""
        for plain, _, grad in self.gradients:
            plain.grad = grad._local_tensor

    def free(self) -> None:
        """Drop the gradients."""
        for plain, param, _ in self.gradients:
            plain.grad = param.grad = None
        self.gradients.clear()


class _Pieces:
    """The parameter groups of one step, cut by reduction: see [Note: Steps in the order of arrival].

    Args:
        groups: the groups, with plain rows as parameters.
        gradients: those of parameters that are sharded. They are taken out, so that nothing else keeps them.
        free_gradients: whether to cut by bucket, and to drop the gradients of a piece after its step.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], gradients: list[PlainGradient], *, free_gradients: bool
    ) -> None:
        is_captured = any(group.get("capturable") for group in groups)  # torch reads all groups before it steps on one
        self._groups, self._frees = groups, free_gradients and not is_captured
        pieces: dict[tuple[int, str], _Piece] = defaultdict(_Piece)
        piece_of: dict[torch.Tensor, _Piece] = {}
        for gradient in gradients:
            plain, param, grad = gradient
            late = None if is_captured else late_of(grad)
            found = param.rows.in_bucket if self._frees else None
            key = 0 if late is None else late.number, "" if found is None else found[0].handle
            piece_of[plain] = piece = pieces[key]
            piece.gradients.append(gradient)
        gradients.clear()
        self._pieces = [pieces[key] for key in sorted(pieces)]
        for index, group in enumerate(groups):
            for plain in group["params"]:
                piece_of.get(plain, self._pieces[0]).groups[index].append(plain)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for piece in self._pieces:
            piece.arrive()
            for index, params in piece.groups.items():
                yield {**self._groups[index], "params": params}
            if self._frees:
                piece.free()
