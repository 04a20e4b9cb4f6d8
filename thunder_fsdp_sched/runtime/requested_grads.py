"""The parameters for which the running backward was called.

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

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..private_autograd import accumulates, backward_number, compiled_node_of, leaf_nodes, running_node
from .row_dtensor import RowDTensor


class _Request(NamedTuple):
    """The gradients that one backward of a compiled forward was asked for.

    Attributes:
        number: the number of the backward.
        added: whether it adds to ``.grad``, for each sharded parameter that forward reads, by its identity.
        adds_all: whether it adds to the ``.grad`` of all of them.
    """

    number: int
    added: dict[int, bool]
    adds_all: bool


def requested(params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
    """Return the indices of the parameters to whose ``.grad`` the running backward adds."""
    node = running_node()
    if node is None:  # a trace that runs outside of autograd
        return frozenset(range(len(params)))
    request = node.metadata.get(_KEY)
    if request is None or request.number != backward_number():
        added = {id(leaf): accumulates(n) is True for leaf, n in leaf_nodes(node) if isinstance(leaf, RowDTensor)}
        node.metadata[_KEY] = request = _Request(backward_number(), added, all(added.values()))
    return frozenset(i for i, param in enumerate(params) if request.added.get(id(param), request.adds_all))


_KEY = "thunder_fsdp_sched.requested"


def guard_backward(no_sync: bool, *outputs: torch.Tensor) -> None:
    """Let backward of a compiled forward raise errors for requests that it cannot fulfil; see [Note: Requested gradients].

    Args:
        no_sync: whether backward accumulates gradients without returning them.
        outputs: the outputs of forward, connected to autograd.
    """
    nodes = compiled_node_of(outputs)
    if nodes is not None:
        first, compiled = nodes
        first.register_prehook(partial(_check, leaf_nodes(compiled) if no_sync else ()))


def _check(leaves: Sequence[tuple[Any, Any]], grads: Any) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "create_graph=True: the backward of a module that Thunder has compiled has no graph, so gradients of gradients "
            "(gradient penalties, Hessians) would be wrong. Leave out create_graph, or compute this term without "
            "thunder.jit"
        )
    for leaf, node in leaves:
        if isinstance(leaf, RowDTensor) and accumulates(node) is None:
            raise RuntimeError(
                f"torch.autograd.grad was called for parameter {leaf.rows.label!r} under no_sync, where gradients are not "
                f"reduced, so there is none to return. Call it outside of no_sync, or call backward()"
            )
