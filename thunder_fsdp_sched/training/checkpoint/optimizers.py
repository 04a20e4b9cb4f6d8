"""Facts about optimizers, compared between ranks before saving, and with a checkpoint before loading."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ...agreement.channel import ranks_by_text
from ...distributed.process_groups import ProcessGroupRef
from .exchange import exchange
from .state_dict import group_label, names_of_params, owned_names

__all__ = ["different_facts", "kind_of", "misfits", "state_of"]

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
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor) or not value.ndim:
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


def misfits(
    optimizer: torch.optim.Optimizer,
    number: int,
    loaded: dict[str, Any],
    states: dict[torch.Tensor, dict[str, Any]],
    names: dict[torch.Tensor, str],
) -> list[str]:
    """Return why a saved state belongs to another kind of optimizer.

    An optimizer that cannot be tried on a parameter of its own (one of another package that needs more than its
    options), and has no state yet, is taken on trust.

    Args:
        number: of the parameter group.
        loaded: the group's options in the checkpoint.
        states: the saved state of its parameters, as far as there is any.
    """
    group = optimizer.param_groups[number]
    own = {key: value for key, value in group.items() if key != "params"}
    place = group_label(optimizer, number)
    faults = []
    for ndim in sorted({param.ndim for param in group["params"]}):
        here, there = _names_after_a_step(optimizer, own, ndim), _names_after_a_step(optimizer, own | loaded, ndim)
        if here is not None and there is not None and here != there:
            options = [
                f"{key}={value!r} where {place} has {own.get(key)!r}"
                for key, value in loaded.items()
                if _names_after_a_step(optimizer, own | {key: value}, ndim) != here
            ]
            how = ", ".join(options) or "other options"
            faults.append(f"it was saved with {how}, and makes state of {_listed(there)} instead of {_listed(here)}")
            continue
        for param in group["params"]:
            saved = frozenset(key for key, value in states.get(param, {}).items() if value is not None)
            expected = there if there is not None else frozenset(optimizer.state.get(param, {}))
            if param.ndim == ndim and saved and saved != expected and (there is not None or expected):
                faults.append(f"it has {_listed(saved)} of {names[param]!r}, {place} would have {_listed(expected)}")
                break
    return faults


def _names_after_a_step(optimizer: torch.optim.Optimizer, options: dict[str, Any], ndim: int) -> frozenset[str] | None:
    """Return the names of the state that an optimizer creates for a parameter; ``None`` if that cannot be tried.

    It is tried on a parameter of one element. No hooks run, and the optimizer stays as it is.
    """
    optimizer = getattr(optimizer, "inner", optimizer)
    param = torch.nn.Parameter(torch.zeros((1,) * ndim))
    param.grad = torch.ones_like(param)
    plain = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in options.items()}
    plain |= {key: False for key in ("capturable", "foreach", "fused") if key in plain}
    try:
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        trial.param_groups = [{**plain, "params": [param]}]
        with torch.no_grad():
            inspect.unwrap(type(trial).step)(trial)
    except Exception:
        return None
    return frozenset(key for key, value in trial.state[param].items() if value is not None)


def _groups(
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterable[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            yield group_label(optimizer, number), optimizer, group


def _text(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
