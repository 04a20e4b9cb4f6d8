"""The gradients that the running backward was asked for.

[Note: Requested gradients]
``backward(inputs=...)`` and ``torch.autograd.grad`` ask for some gradients only. The compiled backward computes all of them,
and autograd drops those that nobody asked for. What accumulates under ``no_sync`` does not pass through autograd. So
autograd is asked which of the nodes that add to a parameter's ``.grad`` it will run, and only the gradients of these
parameters accumulate. The same holds for the backward that ends a window: it returns what has accumulated for a parameter if
it adds to that parameter's ``.grad``, otherwise that waits for a later backward. A backward that adds to all parameters of
its graph counts as one of all parameters of the model.

``torch.autograd.grad`` of parameters returns their gradients instead. It gives those of this backward alone, reduced, and
leaves what has accumulated as it is. Under ``no_sync`` there is no reduced gradient to return, so it raises an error. A
compiled backward has no graph of its own, so ``create_graph=True`` raises an error, too. Both are raised before the
compiled backward starts, from a hook of the node that autograd runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..errors import coded_error
from ..private_torch import accumulates, backward_number, compiled_nodes_of, leaf_nodes, running_node
from .moments import ENDED, moment


class _Request(NamedTuple):
    """The gradients that one backward of a compiled forward was asked for.

    Attributes:
        number: the number of the backward.
        answers: what :func:`accumulates` says of each sharded parameter that forward reads, by its identity.
        adds_all: whether it adds to the ``.grad`` of all of them.
        indices: the answers for the parameters of each bucket that was asked for, by their identity and the question.
    """

    number: int
    answers: dict[int, bool | None]
    adds_all: bool
    indices: dict[tuple[int, Callable[[bool | None], bool]], frozenset[int]]


def requested(params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return the indices of the parameters of a bucket to whose ``.grad`` the running backward adds."""
    return _indices(params, _adds)


def wanted(params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return these indices, and those of parameters whose gradients ``torch.autograd.grad`` returns."""
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
"""The key of its last request in the metadata of Thunder's autograd node."""


def _is_sharded(leaf: torch.Tensor) -> bool:
    return hasattr(leaf, "rows")


def guard_backward(
    no_sync: bool,
    *outputs: torch.Tensor,
    reached: Sequence[int] | None = None,
    by_leaves: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Prepare the autograd node of the forward that has just ended.

    It learns when that was: see [Note: The backward of the most recent forward] in ``moments``. And its backward raises
    errors for requests that it cannot fulfil: see [Note: Requested gradients].

    Args:
        no_sync: whether backward accumulates gradients without returning them.
        outputs: the outputs of forward, connected to autograd.
        reached: for each tensor among the inputs, the outputs that it reaches, as bits; ``None`` if all that reach one reach
            all. See [Note: Outputs without gradient] in ``unused_outputs``.
        by_leaves: for each output of a leaf module, by its name, the outputs that it reaches.
    """
    for first, compiled in compiled_nodes_of(outputs):
        if ENDED not in compiled.metadata:  # otherwise of an earlier forward, whose output this one has returned
            compiled.metadata[ENDED] = moment()
            first.register_prehook(partial(_check, leaf_nodes(compiled) if no_sync else ()))
            if reached is not None:
                from .watched_outputs import watch_outputs

                watch_outputs(first, compiled, reached, by_leaves)


def _check(leaves: Sequence[tuple[Any, Any]], grads: Any) -> None:
    if torch.is_grad_enabled():
        raise coded_error(NotImplementedError, "gradient.create-graph-unsupported")
    for leaf, node in leaves:
        if _is_sharded(leaf) and accumulates(node) is None:
            raise coded_error(RuntimeError, "gradient.autograd-grad-under-no-sync", parameter=leaf.rows.label)
