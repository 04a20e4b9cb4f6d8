"""Gradients that no output of forward has asked for are ``None``, as in the unsharded model.

[Note: Outputs without gradient]
A loss may use one of several outputs. In torch, a parameter that only the others need gets no gradient, so an optimizer
neither decays it nor counts a step. A compiled backward computes the gradients of all parameters; for outputs without
gradient it gets zeros. So:

1. The trace says which outputs each input of the computation reaches (``guard_outputs``), operator by operator, as autograd
   would connect them. If a parameter reaches no output that has a gradient, what backward computes for it is zeros.
2. A hook of the node that autograd runs first sees which outputs have a gradient, before Thunder replaces the others by
   zeros.
3. The collectives are the same in any case, because ranks may use different outputs, and other micro-batches of a window
   may have used a parameter (:attr:`Accumulation.used`). In the round of agreement at the start of backward, each rank
   announces a hash of the parameters that it has not used. Only if the hashes differ do the ranks exchange names. So a
   parameter that some rank has used has a gradient on all ranks, and one that none has used has none on any.
4. A hook of the compiled node, after it has run, replaces what nobody has used by ``None``.

Traces in which every parameter reaches every output, such as most of those with a loss alone, need neither hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..private_torch import backward_number, running_node

if TYPE_CHECKING:
    from .bucket import Bucket

_KEY = "thunder_fsdp_sched.unused"


class _Running:
    """State of the running backward of one compiled forward.

    Attributes:
        given: the outputs that have a gradient on this rank, as bits.
        unused: the sharded parameters, by identity, that reach none of them.
        agreed: for each bucket, the parameters that no rank has used; ``None`` if the ranks have not agreed.
        dropped: the sharded parameters, by identity, for which backward returns no gradient.
    """

    def __init__(self) -> None:
        self._number = -1
        self.given = 0
        self.unused: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Forget what holds for an earlier backward only."""
        if self._number != (number := backward_number()):
            self._number = number
            self.agreed: Mapping[Bucket, frozenset[int]] | None = None
            self.dropped: set[int] = set()


def watch_outputs(first: Any, compiled: Any, reached: Sequence[int]) -> None:
    """Let a backward return ``None`` for inputs that reach no output with a gradient.

    Args:
        first: the node that autograd runs first.
        compiled: the node that runs the compiled trace.
        reached: for each tensor that ``compiled`` computes a gradient of, the outputs that it reaches, as bits.
    """
    nodes = [following for following, _ in compiled.next_functions]
    assert len(nodes) == len(reached), "the node has an edge for each tensor among the inputs of the computation"
    leaves = [getattr(node, "variable", None) for node in nodes]
    inputs = [(id(leaf) if hasattr(leaf, "rows") else None, bits) for leaf, bits in zip(leaves, reached, strict=True)]
    running = compiled.metadata[_KEY] = _Running()
    first.register_prehook(partial(_see_given, running, inputs))
    compiled.register_hook(partial(_drop_unused, running, inputs))


_Inputs = Sequence[tuple[int | None, int]]
"""Of each input, the identity if it is a sharded parameter, and the outputs that it reaches."""


def _see_given(running: _Running, inputs: _Inputs, grads: Sequence[torch.Tensor | None]) -> None:
    running.given = sum(1 << number for number, grad in enumerate(grads) if grad is not None)
    running.unused = frozenset(param for param, bits in inputs if param is not None and not bits & running.given)


def _drop_unused(running: _Running, inputs: _Inputs, grads: Sequence[torch.Tensor | None], _: Any) -> Any:
    return tuple(
        None if (param in running.dropped if param is not None else not bits & running.given) else grad
        for grad, (param, bits) in zip(grads, inputs, strict=True)
    )


def _running() -> _Running | None:
    node = running_node()
    if node is None:  # a trace that runs outside of autograd
        return None
    running: _Running = node.metadata.setdefault(_KEY, _Running())
    running.begin()
    return running


def not_used_here(bucket: Bucket) -> frozenset[int]:
    """Return the parameters of which the running backward computes zeros on this rank, for lack of gradients."""
    running = _running()
    if running is None or not running.unused:
        return frozenset()
    return frozenset(index for index, param in enumerate(bucket.params) if id(param) in running.unused)


def unused_gradients(bucket: Bucket, missing: frozenset[int]) -> frozenset[int]:
    """Return the parameters that neither the running backward nor its window has used, on this rank or if agreed on any.

    Args:
        missing: the parameters of which the trace computes no gradient.
    """
    running, accumulation = _running(), bucket.accumulation
    if running is not None and running.agreed is not None and bucket in running.agreed:
        return running.agreed[bucket]
    if bucket.base.control is not None and not bucket.base.control.agrees_in_steps:
        return frozenset()  # another rank may have used them
    unused = not_used_here(bucket)
    if accumulation.params and bucket.ends_window():
        unused = (unused | (accumulation.params & missing)) - accumulation.used
    return unused


def agree_on_unused(agreed: Mapping[Bucket, frozenset[int]]) -> None:
    """Let the running backward know which parameters no rank has used, for each bucket that it reduces."""
    if (running := _running()) is not None:
        running.agreed = agreed


def drop_gradients(bucket: Bucket, indices: frozenset[int]) -> None:
    """Let the running backward return ``None`` for these parameters."""
    if indices and (running := _running()) is not None:
        running.dropped.update(id(bucket.params[index]) for index in indices)
