"""Let optimizers that treat each element by itself step on rows, and let their state dicts hold whole state.

[Note: Optimizers on rows]
A step on DTensors calls the dispatcher for each operator and parameter, which takes several times as long as the step
itself. Optimizers of torch that treat each element by itself do not need it. Before such an optimizer's
step, a hook hands the step to a *twin*: an optimizer of the same class and options whose parameters, gradients and
state are this rank's rows as plain tensors. The inner dicts of state are those of the optimizer. All other optimizers
step on DTensors, whose operators give the result of the unsharded parameters.

State that the optimizer has for unsharded parameters, from steps before ``thunder.jit`` or from a loaded state dict,
does not fit rows, or broadcasts to them without an error. So each optimizer is checked before its first step on shards,
and again after it has loaded a state.

After an optimizer's first step, its ``state_dict`` has DTensors, like that of a model, because ``dcp.save`` and
``torch.save`` would mistake plain rows for whole state. Entries that are loaded become rows again at the next step.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..runtime.row_dtensor import RowDTensor
from .replacement import replace_in_optimizer
from .state_entries import RowPiece, as_entry, refuse_unshared, rows_from

__all__ = ["is_rows", "look_again"]

_ON_ROWS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    # Refused for parameters that are cut (``whole_parameters``); of the others, a rank has all rows or none.
    torch.optim.Adafactor,
    torch.optim.Muon,
)
"""The optimizers of torch that treat each element by itself, or each parameter. Classes derived from them may not."""

_GRAD = operator.attrgetter("grad")

_sharded_models = 0  # in this process; when it grows, optimizers are checked again


class _Known:
    """The result of checking an optimizer.

    Attributes:
        sharded_models: the number of sharded models at the time of the check.
        twin: steps in place of the optimizer, unless it steps on DTensors.
    """

    def __init__(self) -> None:
        self.sharded_models = -1
        self.twin: _Twin | None = None

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.sharded_models == _sharded_models and (self.twin is None or self.twin.fits(optimizer))


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()


def look_again() -> None:
    """Check every optimizer again before its next step, because a module was sharded."""
    global _sharded_models
    _sharded_models += 1


class _Twin:
    """The same optimizer on rows, as plain tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: torch.optim.Optimizer = object.__new__(type(optimizer))
        self._of = [list(group["params"]) for group in optimizer.param_groups]
        self._groups = [
            [p._local_tensor.detach() if isinstance(p, RowDTensor) else p for p in params] for params in self._of
        ]
        every = zip(itertools.chain(*self._of), itertools.chain(*self._groups), strict=True)
        self._pairs = [(param, rows) for param, rows in every if param is not rows]
        self._params = [param for param, _ in self._pairs]
        self._rows = [rows for _, rows in self._pairs]
        self._without_state: list[tuple[Any, Any]] = []  # those of ``_pairs`` that had none before the step
        self._plain = [rows for rows in itertools.chain(*self._groups) if isinstance(rows, torch.nn.Parameter)]

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer still has the same parameters."""
        return len(self._of) == len(optimizer.param_groups) and all(
            len(ours) == len(group["params"]) and all(map(operator.is_, ours, group["params"]))
            for ours, group in zip(self._of, optimizer.param_groups, strict=True)
        )

    def step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the optimizer's class steps on rows."""
        twin, states = self.optimizer, optimizer.state
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict, {plain: states[plain] for plain in self._plain if plain in states})
        self._take(states)
        twin.param_groups = [
            {**group, "params": rows} for group, rows in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        _, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if closure is not None:

            def closure_on_shards() -> Any:
                loss = closure()
                self._take(states)
                return loss

            others, kwargs = [], {**kwargs, "closure": closure_on_shards}
        return (twin, *others), kwargs

    def _take(self, states: dict[Any, Any]) -> None:
        """Give the twin the gradients, and the state of parameters that have some."""
        # Loops in C where there are some: with thousands of parameters this takes a tenth of a fused step.
        twin_states = self.optimizer.state
        found = list(map(states.get, self._params))
        self._without_state = [pair for pair, state in zip(self._pairs, found, strict=True) if state is None]
        twin_states.update(zip(self._rows, found, strict=True))
        for _, rows in self._without_state:
            del twin_states[rows]
        changed = self._params
        for rows, grad in zip(self._rows, map(_GRAD, self._params), strict=True):
            if grad is None:
                rows.grad, changed = None, []
            else:
                rows.grad = grad._local_tensor
        if not changed:
            changed = [param for param, rows in self._pairs if rows.grad is not None]
        # As in an unsharded run, a backward whose forward was before this step finds changed parameters.
        torch.autograd.graph.increment_version(changed)

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer what the step has changed."""
        twin, states = self.optimizer, optimizer.state
        for rows in self._rows:
            rows.grad = None
        for param, rows in self._without_state:
            if rows in twin.state:
                states[param] = twin.state[rows]
        for plain in self._plain:
            if plain in twin.state:
                states[plain] = twin.state[plain]
        groups = optimizer.param_groups
        for group, changed in zip(groups, twin.param_groups, strict=True):
            group.update({key: value for key, value in changed.items() if key != "params"})
        optimizer.__dict__.update({**twin.__dict__, "param_groups": groups, "state": states})
        twin.__dict__.clear()  # it may refer to the optimizer, whose life must not depend on its twin's


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _known.get(optimizer)
    if known is None or not known.is_current(optimizer):
        known = _check(optimizer)
    return None if known.twin is None else known.twin.step(optimizer, args, kwargs)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _known.get(optimizer)
    if known is not None and known.twin is not None:
        known.twin.finish(optimizer)


def _check(optimizer: torch.optim.Optimizer) -> _Known:
    replace_in_optimizer(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, RowDTensor)]
    is_sharded = not hasattr(optimizer, "owns")  # WholeParameters has whole state for rows
    on_rows = is_sharded and type(optimizer) in _ON_ROWS
    if is_sharded:
        for param in params:
            _check_state(optimizer, param, on_rows=on_rows)
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = _Known()
        optimizer.register_load_state_dict_post_hook(_forget)
        if is_sharded:
            optimizer.register_state_dict_post_hook(_hold_entries)
    known.sharded_models = _sharded_models
    known.twin = _Twin(optimizer) if on_rows and params else None
    return known


def _check_state(optimizer: torch.optim.Optimizer, param: RowDTensor, *, on_rows: bool) -> None:
    """Turn state into rows, plain tensors if the optimizer steps on rows, else DTensors."""
    state, rows = optimizer.state.get(param, {}), param.rows
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or (
            isinstance(value, RowDTensor) and value.rows == rows and not on_rows
        ):
            continue
        if isinstance(value, RowDTensor) and value.rows == rows:
            state[key] = value._local_tensor
        elif isinstance(value, (DTensor, RowPiece)):
            if rows.place is None:
                continue
            try:
                local = rows_from(*rows.place, value, as_rows=True)
            except ValueError as error:
                raise ValueError(
                    f"{type(optimizer).__name__}: state {key!r} of parameter {rows.label!r}: {error}"
                ) from None
            state[key] = local if on_rows else RowDTensor.wrap(local, rows)
        elif value.ndim and value.shape == rows.local_shape:
            state[key] = value if on_rows else RowDTensor.wrap(value, rows)
        elif value.ndim and value.shape == rows.shape:
            raise ValueError(
                f"{type(optimizer).__name__}: state {key!r} of parameter {rows.label!r} has the shape {tuple(rows.shape)} "
                f"of the unsharded parameter, but the optimizer now trains this rank's rows {rows.local_shape}: it was "
                f"created and stepped before thunder.jit, or has loaded the state of an unsharded run. Create a new "
                f"optimizer, and load its state with thunder_fsdp_sched.load_checkpoint"
            )


def _hold_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace plain rows in a state with DTensors."""
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, number in zip(group["params"], saved["params"], strict=True):
            place = param.rows.place if isinstance(param, RowDTensor) else None
            if place is not None and number in states:
                refuse_unshared(place[0])
                states[number] = {
                    key: as_entry(*place, value, as_rows=True) if is_rows(value, param) else value
                    for key, value in states[number].items()
                }
    return {**state_dict, "state": states}


def is_rows(value: Any, param: RowDTensor) -> bool:
    """Return whether a value of an optimizer's state is this rank's rows of the state of ``param``, as a plain tensor."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, (DTensor, RowPiece))
        and value.ndim > 0
        and value.shape == param.rows.local_shape
    )


def _forget(optimizer: torch.optim.Optimizer) -> None:
    _known[optimizer].sharded_models = -1


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
