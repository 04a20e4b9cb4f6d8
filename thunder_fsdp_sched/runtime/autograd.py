"""The running backward: the gradients that it was asked for and given, and the values that its own forward wrote.

[Note: Requested gradients]
``backward(inputs=...)`` and ``torch.autograd.grad`` ask for some gradients only. The compiled backward computes all of them,
and autograd drops those that nobody asked for. But gradients that accumulate under ``no_sync`` do not pass through
autograd. So autograd is asked whether it will run the node that adds to a parameter's ``.grad``, and only the
gradients of such parameters accumulate. The backward that ends a window does the same: it returns a parameter's
accumulated gradient if it adds to that parameter's ``.grad``; otherwise the gradient waits for a later backward. A
backward that adds to all parameters of its graph counts as one of all parameters of the model.

``torch.autograd.grad`` of parameters returns the reduced gradients of this backward alone, and leaves accumulated ones
as they are. Under ``no_sync`` there is no reduced gradient to return, so it raises an error. A compiled backward has no
graph of its own, so ``create_graph=True`` raises an error, too. Both errors come before the compiled backward starts,
from a hook of the node that autograd runs first.

[Note: The backward of the most recent forward]
Backward may reuse values that its own forward gathered or cast, but none of a later forward: between two forwards a
parameter may have been written through ``.data`` (an evaluation with averaged parameters), which changes no version
counter.

So this process counts *moments*. A gathered or cast value is stored with the moment at which it was written. Right
after a forward, ``guard_backward`` stores the moment in the autograd node that Thunder has created for its backward. A
value with an earlier moment was written by this forward, or by one before it; a value with a later moment is not
reused. Autograd's own numbers of nodes are no help: each thread counts its own, and the backward of a GPU runs on
another thread. Outside of an autograd node nothing is reused.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..errors import coded_error
from ..private_thunder import saved_objects
from ..private_torch import accumulates, backward_number, compiled_nodes_of, leaf_nodes, running_node

ENDED = "thunder_fsdp_sched.ended"
"""The key of the moment at which its forward ended, in the metadata of Thunder's autograd node."""

_moments = itertools.count(1)


def moment() -> int:
    """Return a number larger than all earlier ones, on any thread."""
    return next(_moments)


def end_of_forward() -> int | None:
    """Return the moment at which the forward of the running backward had ended; ``None`` if it is unknown."""
    node = running_node()
    return None if node is None else node.metadata.get(ENDED)


def running_backward_of() -> tuple[int, int] | None:
    """Return the number of the running backward, and the moment at which its forward ended; ``None`` if unknown."""
    ended = end_of_forward()
    return None if ended is None else (backward_number(), ended)


def is_of_running_backward(written: int) -> bool:
    """Return whether ``written`` is a moment before the end of the running backward's forward."""
    ended = end_of_forward()
    return ended is not None and written < ended


class _Request(NamedTuple):
    """The gradients that one backward of a compiled forward was asked for.

    Attributes:
        number: the number of the backward.
        answers: the result of :func:`accumulates` for each sharded parameter that forward reads, by its identity.
        adds_all: whether it adds to the ``.grad`` of all of them.
        indices: cached results for a bucket's parameters, keyed by their identity and the condition.
    """

    number: int
    answers: dict[int, bool | None]
    adds_all: bool
    indices: dict[tuple[int, Callable[[bool | None], bool]], frozenset[int]]


def requested(params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return the indices of the parameters of a bucket to whose ``.grad`` the running backward adds."""
    return _indices(params, _adds)


def wanted(params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return the same indices as :func:`requested`, and those of gradients that ``torch.autograd.grad`` returns."""
    return _indices(params, _adds_or_returns)


def _adds(answer: bool | None) -> bool:
    return answer is True


def _adds_or_returns(answer: bool | None) -> bool:
    return answer is not False


def _indices(params: Sequence[torch.nn.Parameter], counts: Callable[[bool | None], bool]) -> frozenset[int]:
    node = running_node()
    if node is None:  # a trace that runs outside of autograd
        return frozenset(range(len(params)))
    request = node.metadata.get(_KEY)
    if request is None or request.number != backward_number():
        answers = {id(leaf): accumulates(n) for leaf, n in leaf_nodes(node) if _is_sharded(leaf)}
        request = _Request(backward_number(), answers, all(answer is True for answer in answers.values()), {})
        node.metadata[_KEY] = request
    key = id(params), counts
    if key not in request.indices:
        answers, adds_all = request.answers, request.adds_all
        request.indices[key] = frozenset(i for i, p in enumerate(params) if counts(answers.get(id(p), adds_all)))
    return request.indices[key]


_KEY = "thunder_fsdp_sched.requested"
"""The key of the latest request, in the metadata of Thunder's autograd node."""


def _is_sharded(leaf: torch.Tensor) -> bool:
    return hasattr(leaf, "rows")


def guard_backward(
    no_sync: bool,
    *outputs: torch.Tensor,
    reached: Sequence[int] | None = None,
    by_leaves: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Prepare the autograd node of the forward that has just ended.

    Store the moment in it: see [Note: The backward of the most recent forward]. Let its backward raise errors for
    requests that it cannot fulfil: see [Note: Requested gradients].

    Args:
        no_sync: whether backward accumulates gradients without returning them.
        outputs: the outputs of forward, connected to autograd.
        reached: for each tensor among the inputs, the outputs that it reaches, as bits; ``None`` if all that require a
            gradient reach the same. See [Note: Outputs without gradient] in ``unused_outputs``.
        by_leaves: for each output of a leaf module, by its name, the outputs that it reaches.
    """
    for first, compiled in compiled_nodes_of(outputs):
        if ENDED not in compiled.metadata:  # otherwise it belongs to an earlier forward, whose output this one returns
            compiled.metadata[ENDED] = moment()
            first.register_prehook(partial(_check, leaf_nodes(compiled) if no_sync else ()))
            if reached is not None:
                watch_outputs(first, compiled, reached, by_leaves)


def _check(leaves: Sequence[tuple[Any, Any]], grads: Any) -> None:
    if torch.is_grad_enabled():
        raise coded_error(NotImplementedError, "gradient.create-graph-unsupported")
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise coded_error(NotImplementedError, "gradient.anomaly-check-of-nan")
    for leaf, node in leaves:
        if _is_sharded(leaf) and accumulates(node) is None:
            raise coded_error(RuntimeError, "gradient.autograd-grad-under-no-sync", parameter=leaf.rows.label)


_UNUSED = "thunder_fsdp_sched.unused"
"""The key of the running backward in the metadata of Thunder's autograd node."""


class RunningBackward:
    """State of the running backward of one compiled forward; see [Note: Outputs without gradient] in ``unused_outputs``.

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
        """Reset the state of an earlier backward."""
        if self._number != (number := backward_number()):
            self._number = number
            self.agreed: Mapping[Any, frozenset[int]] | None = None
            self.dropped: set[int] = set()


def running_backward() -> RunningBackward | None:
    """Return the state of the running backward; ``None`` for a trace that runs outside of autograd."""
    node = running_node()
    if node is None:
        return None
    running: RunningBackward | None = node.metadata.get(_UNUSED)
    if running is None:
        running = node.metadata[_UNUSED] = RunningBackward()
    running.begin()
    return running


def watch_outputs(first: Any, compiled: Any, reached: Sequence[int], by_leaves: Mapping[str, Sequence[int]]) -> None:
    """Let a backward return ``None`` for inputs that reach no output with a gradient.

    Args:
        first: the node that autograd runs first.
        compiled: the node that runs the compiled trace.
        reached: for each tensor for which ``compiled`` computes a gradient, the outputs that it reaches, as bits.
        by_leaves: for each output of a leaf module, by its name, the outputs that it reaches.
    """
    nodes = [following for following, _ in compiled.next_functions]
    assert len(nodes) == len(reached), "the node has an edge for each tensor among the inputs of the computation"
    leaves = [getattr(node, "variable", None) for node in nodes]
    total: dict[int, int] = defaultdict(int)  # a tied parameter is several inputs, and one of them gets the gradient
    for leaf, bits in zip(leaves, reached, strict=True):
        total[id(leaf)] |= bits
    for state in (state for state in saved_objects(compiled) if getattr(state, "name", "") in by_leaves):
        for bits, params in zip(by_leaves[state.name], state.used, strict=True):
            for param in params:
                total[param] |= bits
    inputs = [
        (id(leaf) if hasattr(leaf, "rows") else None, bits if leaf is None else total[id(leaf)])
        for leaf, bits in zip(leaves, reached, strict=True)
    ]
    running = compiled.metadata[_UNUSED] = RunningBackward()
    first.register_prehook(partial(_see_given, running, inputs))
    compiled.register_hook(partial(_drop_unused, running, inputs))


_Inputs = Sequence[tuple[int | None, int]]
"""For each input, its identity if it is a sharded parameter, and the outputs that it reaches."""


def _see_given(running: RunningBackward, inputs: _Inputs, grads: Sequence[torch.Tensor | None]) -> None:
    running.given = sum(1 << number for number, grad in enumerate(grads) if grad is not None)
    running.unused = frozenset(param for param, bits in inputs if param is not None and not bits & running.given)


def _drop_unused(running: RunningBackward, inputs: _Inputs, grads: Sequence[torch.Tensor | None], _: Any) -> Any:
    return tuple(
        None if (param in running.dropped if param is not None else not bits & running.given) else grad
        for grad, (param, bits) in zip(grads, inputs, strict=True)
    )
