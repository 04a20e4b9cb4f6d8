"""Run the steps of torch's own optimizers on plain tensors, this rank's rows.

[Note: Steps on plain rows]
An operator on a :class:`RowDTensor` goes through Python, which takes several times as long as a small operator on a CPU, and
a step runs a dozen of them for each parameter. Most of torch's optimizers are elementwise, so they can step on this
rank's rows as plain tensors. torch lets a hook before a step replace the arguments of the step, the first of which is
the optimizer. So the step runs on a stand-in, an object of a derived class that shares all attributes of the optimizer
but ``param_groups`` and ``state``. Nothing is kept from one step to the next, and an exception leaves the user's
optimizer as it would leave an unsharded one: values are written in place, and state that the step adds to a parameter
becomes rows in the optimizer's own state at once.

Everything else steps on rows (see [Note: Optimizers on rows] in ``optimizer_steps``): classes of users, whose steps may
read whole parameters; steps with a closure, which computes other gradients; and those with other hooks, which would see the
stand-in, or gradients that it does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from ..private_torch import grads_of, step_hooks
from ..runtime.row_dtensor import RowDTensor
from ..runtime.rows import Rows

_ELEMENTWISE = frozenset({ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD})
"""The elementwise optimizers of torch. Derived classes do not count."""

CUT = "_fsdp_sched_cut"
"""The attribute of an optimizer that cuts the groups of its steps: see ``extras.training.overlap_step``."""

PlainGradient = tuple[torch.Tensor, RowDTensor, RowDTensor]
"""The plain rows of a parameter, the parameter, and its gradient."""

_PACKAGE = __name__.partition(".")[0]


def on_plain_rows(optimizer: torch.optim.Optimizer) -> Any:
    """Return a stand-in with plain rows for the optimizer's step; ``None`` if it has to step on :class:`RowDTensor`."""
    own: Any = type(optimizer)
    if not is_elementwise(optimizer) or _has_other_hooks(optimizer):
        return None
    groups, state = [], _PlainState(optimizer.state)
    for group in optimizer.param_groups:
        if any(isinstance(option, torch.Tensor) and option.ndim for option in group.values()):
            return None  # state that is made of it could be taken for rows
        params = group["params"]
        if len(set(map(id, params))) < len(params):
            return None  # they share state
        plain = list(map(state.add, params, grads_of(params)))
        if any(param is None for param in plain):
            return None
        groups.append({**group, "params": plain})
    if not state.written:
        return None
    torch.autograd.graph.increment_version(state.written)  # operators on plain rows do not change these versions
    cls = _stand_in_for(own)
    stand_in = cls.__new__(cls)
    stand_in.__dict__ = optimizer.__dict__
    stand_in.param_groups, stand_in.state = getattr(optimizer, CUT, with_gradients)(groups, state.gradients), state
    return stand_in


def with_gradients(groups: Sequence[dict[str, Any]], gradients: Iterable[PlainGradient]) -> Sequence[dict[str, Any]]:
    """Give plain rows their gradients, and return the groups."""
    for plain, _, grad in gradients:
        plain.grad = grad._local_tensor
    return groups


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is elementwise, whatever the groups of its parameters."""
    return type(optimizer) in _ELEMENTWISE and not optimizer.defaults["differentiable"]


def _has_other_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return any(not getattr(hook, "__module__", "").startswith(f"{_PACKAGE}.") for hook in step_hooks(optimizer))


def _are_alike(tensor: RowDTensor, param: RowDTensor) -> bool:
    return tensor.rows == param.rows and tensor.dtype is param.dtype


@functools.cache
def _stand_in_for(cls: type[torch.optim.Optimizer]) -> Any:
    # As slots, these two hide the entries of the `__dict__` that the stand-in shares.
    return type(cls.__name__, (cls,), {"__slots__": ("param_groups", "state"), "__module__": __name__})


class _PlainState(dict[Any, Any]):
    """The state of an optimizer, keyed by plain rows instead of parameters.

    Attributes:
        new: the parameters without state, keyed by plain rows.
        gradients: the gradients of sharded parameters.
        written: the rows that the step may write.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.new: dict[torch.Tensor, RowDTensor] = {}
        self.gradients: list[PlainGradient] = []
        self.written: list[torch.Tensor] = []

    def add(self, param: Any, grad: Any) -> Any:
        """Return the plain rows of a parameter; ``None`` if its gradient or its state has other rows.

        A parameter without a gradient, which the step ignores, or one that is not sharded is returned unchanged.
        """
        if grad is None or type(param) is not RowDTensor:
            return param
        local, spec = param._local_tensor, cast(Any, param._spec)
        if not isinstance(grad, RowDTensor) or not (grad._spec is spec or _are_alike(grad, param)):
            return None
        plain = local.data  # another object, for a gradient of its own
        self.gradients.append((plain, param, grad))
        self.written += (param, local)
        if (entries := self._state.get(param)) is None:
            self.new[plain] = param
            return plain
        self[plain] = of_param = _Entries(entries)
        of_param.entries, of_param.rows = entries, spec.rows
        for key, value in entries.items():
            if type(value) is RowDTensor and (value._spec is spec or _are_alike(value, param)):
                self.written.append(value)
                dict.__setitem__(of_param, key, value._local_tensor)
            elif isinstance(value, torch.Tensor) and (type(value) is not torch.Tensor or value.ndim):
                return None
        return plain

    def __missing__(self, plain: torch.Tensor) -> Any:
        if (param := self.new.get(plain)) is None:  # one that is not sharded
            return self._state[plain]
        self[plain] = entries = _Entries()
        entries.entries, entries.rows = self._state[param], param.rows
        return entries


class _Entries(dict[str, Any]):
    """The state of one parameter as plain rows. Values that are set become rows in the optimizer's own state."""

    __slots__ = ("entries", "rows")

    entries: dict[str, Any]
    rows: Rows

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key) is not value or key not in self.entries:
            is_rows = isinstance(value, torch.Tensor) and value.ndim
            self.entries[key] = RowDTensor.wrap(value, self.rows) if is_rows else value
        super().__setitem__(key, value)
