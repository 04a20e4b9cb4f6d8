"""Private names of torch's autograd, each used in one function only.

``docs/private_api.md`` lists them, with what to do when one disappears.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def next_node_number() -> int:
    """Return the number of the next autograd node that this thread creates."""
    return torch._C._autograd._get_sequence_nr()


def running_node_number() -> int | None:
    """Return the number of the autograd node whose backward this thread runs, ``None`` outside of a backward."""
    node = running_node()
    return None if node is None else node._sequence_nr()


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks, such as ``torch.autograd.graph.save_on_cpu``, read what this thread saves for backward."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def running_node() -> Any:
    """Return the autograd node whose backward this thread runs, ``None`` outside of a backward."""
    return torch._C._current_autograd_node()


def backward_number() -> int:
    """Return the number of the backward that this thread runs, which no other backward has; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def leaf_nodes(node: Any) -> list[tuple[Any, Any]]:
    """Return the leaves whose gradients ``node`` computes, each with the node that accumulates its gradient."""
    nodes = (following for following, _ in node.next_functions if following is not None)
    return [(leaf, following) for following in nodes if (leaf := getattr(following, "variable", None)) is not None]


def accumulates(node: Any) -> bool | None:
    """Return whether the running backward adds to the gradient of a leaf: ``None`` if ``autograd.grad`` returns it.

    It is false for a leaf that is not among the ``inputs`` of ``backward`` or ``autograd.grad``.

    Args:
        node: the node that accumulates the leaf's gradient.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf among the inputs of autograd.grad, inside of a backward
        return None


def compiled_node_of(tensors: Iterable[Any]) -> tuple[Any, Any] | None:
    """Return the first node of Thunder's backward and the one that runs the compiled trace; ``None`` without backward.

    Args:
        tensors: the outputs of one compiled forward, and any others.
    """
    for tensor in tensors:
        node = getattr(tensor, "grad_fn", None)
        if node is not None and node.name() == "ThunderOutputFunctionBackward":
            return node, node.next_functions[0][0]
        if node is not None and node.name() == "ThunderFunctionBackward":  # thunderfx_disable_split_autograd
            return node, node
    return None


def hooks_of(leaf: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a leaf's tensor hooks and post-accumulate-grad hooks: the dictionaries that handles remove them from."""
    return leaf._backward_hooks or {}, leaf._post_accumulate_grad_hooks or {}


def set_hooks(leaf: Any, hooks: dict[int, Any], accumulated_hooks: dict[int, Any]) -> None:
    """Give a leaf dictionaries of tensor hooks and post-accumulate-grad hooks, unless they are empty."""
    if hooks:
        leaf._backward_hooks = hooks
    if accumulated_hooks:
        leaf._post_accumulate_grad_hooks = accumulated_hooks
