"""Facts about optimizers, compared between ranks before saving, and with a checkpoint before loading."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves_with_path

from ...agreement.channel import ranks_by_text
from ...distributed.process_groups import ProcessGroupRef
from ...sharding.state_entries import RowPiece
from .exchange import exchange
from .state_dict import group_label, names_of_params, owned_names

__all__ = ["different_facts", "kind_of", "misfit", "state_of"]

Facts = dict[str, str]
"""A fact that must be the same on all ranks: its description and its value."""


def kind_of(model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]) -> Facts:
    """Describe the optimizers and their parameters."""
    names = names_of_params(model, optimizers)
    facts = {"optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"}
    for place, _, group in _groups(optimizers):
        facts[f"the parameters of {place}"] = ", ".join(names[param] for param in group["params"])
    return facts


def state_of(model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]) -> Facts:
    """Describe the values that one rank saves for all: options of parameter groups, names and numbers of the state."""
    names = names_of_params(model, optimizers)
    owned = owned_names(names, optimizers)
    facts: Facts = {}
    for place, optimizer, group in _groups(optimizers):
        for key, value in group.items():
            if key != "params":
                facts[f"{key!r} of {place}"] = _text(value)
        for param in group["params"]:
            if names[param] not in owned:
                state = optimizer.state.get(param, {})
                facts[f"the state of {names[param]!r}"] = ", ".join(sorted(state)) or "none"
                for path, value in tree_leaves_with_path(state):
                    if not isinstance(value, torch.Tensor) or (
                        not value.ndim and not isinstance(value, (DTensor, RowPiece))
                    ):
                        key = ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
                        facts[f"{key!r} of {names[param]!r}"] = _text(value)
    return facts


def different_facts(group: ProcessGroupRef, what: str, facts: Facts) -> str:
    """Compare facts between ranks; a collective, of two rounds if they differ.

    Returns:
        The first difference, with the ranks of each value; empty if there is none.
    """
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(exchange(group, what, digest))) == 1:
        return ""
    everyones = exchange(group, f"{what}, in full", facts)
    for name in dict.fromkeys(name for theirs in everyones for name in theirs):
        values_of = (theirs.get(name, "none") for theirs in everyones)
        ranks_of = ranks_by_text(zip(group.global_ranks, values_of, strict=False))
        if len(ranks_of) > 1:
            values = "; ".join(f"{_short(value)} on ranks {ranks}" for value, ranks in ranks_of.items())
            return f"{name}: {values}"
    return "their order"


def misfit(optimizer: torch.optim.Optimizer, number: int, saved: dict[str, Any]) -> str:
    """Return why a parameter group was saved by another kind of optimizer; empty if it was not.

    Args:
        number: of the parameter group.
        saved: its options in the checkpoint.
    """
    own, label = optimizer.param_groups[number], group_label(optimizer, number)
    if unknown := sorted(saved.keys() - own.keys() - _ADDED):
        return f"it was saved by another kind of optimizer: {label} has no option {', '.join(map(repr, unknown))}"
    for key in _SELECT_STATE & saved.keys() & own.keys():
        if bool(saved[key]) != bool(own[key]):
            return f"it was saved with {key}={saved[key]!r} where {label} has {own[key]!r}, and makes other state"
    return ""


_ADDED = {"params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Keys of parameter groups that are not options of the optimizer, or that schedulers add."""

_SELECT_STATE = {"amsgrad", "centered", "momentum"}
"""Options of optimizers of torch that decide which state they make."""


def _groups(
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterable[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            yield group_label(optimizer, number), optimizer, group


def _text(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
