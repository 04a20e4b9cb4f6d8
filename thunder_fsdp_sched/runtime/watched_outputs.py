"""The running backward, of which outputs of forward it has gradients, and the hooks that find out.

See [Note: Outputs without gradient] in ``unused_outputs``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..private_thunder import saved_objects
from ..private_torch import backward_number, running_node

KEY = "thunder_fsdp_sched.unused"


class RunningBackward:
    """State of the running backward of one compiled forward.

    Attributes:
        given: the outputs that have a gradient on this rank, as bits.
        unused: the sharded parameters, by identity, that reach none of them.
        agreed: for each bucket, the parameters that no rank has used; ``None`` if the ranks have not agreed.
        dropped: the sharded parameters, by identity, for which backward returns no gradient.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self.given = 0
        self.unused: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Forget what holds for an earlier backward only."""
        if self._number != (number := backward_number()):
            self._number = number
            self.agreed: Mapping[Any, frozenset[int]] | None = None
            self.dropped: set[int] = set()


def running_backward() -> RunningBackward | None:
    """Return the state of the running backward; ``None`` for a trace that runs outside of autograd."""
    node = running_node()
    if node is None:
        return None
    running: RunningBackward | None = node.metadata.get(KEY)
    if running is None:
        running = node.metadata[KEY] = RunningBackward()
    running.begin()
    return running


def watch_outputs(first: Any, compiled: Any, reached: Sequence[int], by_leaves: Mapping[str, Sequence[int]]) -> None:
    """Let a backward return ``None`` for inputs that reach no output with a gradient.

    Args:
        first: the node that autograd runs first.
        compiled: the node that runs the compiled trace.
        reached: for each tensor that ``compiled`` computes a gradient of, the outputs that it reaches, as bits.
        by_leaves: for each output of a leaf module, by its name, the outputs that it reaches.
    """
    nodes = [following for following, _ in compiled.next_functions]
    assert len(nodes) == len(reached), "the node has an edge for each tensor among the inputs of the computation"
    leaves = [getattr(node, "variable", None) for node in nodes]
    total: dict[int, int] = defaultdict(int)  # a tied parameter is several inputs, whose gradient one of them gets
    for leaf, bits in zip(leaves, reached, strict=True):
        total[id(leaf)] |= bits
    inputs = [
        (id(leaf) if hasattr(leaf, "rows") else None, bits if leaf is None else total[id(leaf)])
        for leaf, bits in zip(leaves, reached, strict=True)
    ]
    running = compiled.metadata[KEY] = RunningBackward()
    states = [state for state in saved_objects(compiled) if getattr(state, "name", "") in by_leaves]
    of_leaves = [pair for state in states for pair in zip(by_leaves[state.name], state.used, strict=True)]
    first.register_prehook(partial(_see_given, running, inputs, of_leaves))
    compiled.register_hook(partial(_drop_unused, running, inputs))


_Inputs = Sequence[tuple[int | None, int]]
"""Of each input, the identity if it is a sharded parameter, and the outputs that it reaches."""


def _see_given(
    running: RunningBackward,
    inputs: _Inputs,
    of_leaves: Sequence[tuple[int, frozenset[int]]],
    grads: Sequence[torch.Tensor | None],
) -> None:
    running.given = sum(1 << number for number, grad in enumerate(grads) if grad is not None)
    used = {param for bits, params in of_leaves if bits & running.given for param in params}
    running.unused = frozenset(
        param for param, bits in inputs if param is not None and not bits & running.given and param not in used
    )


def _drop_unused(running: RunningBackward, inputs: _Inputs, grads: Sequence[torch.Tensor | None], _: Any) -> Any:
    return tuple(
        None if (param in running.dropped if param is not None else not bits & running.given) else grad
        for grad, (param, bits) in zip(grads, inputs, strict=True)
    )
