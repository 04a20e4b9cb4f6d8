"""The base operators that torch runs for a function and its gradient, recorded on fake tensors.

[Note: What torch runs]
The function runs forward and backward on fake tensors under a dispatch mode, which records the base operators that torch
calls. A function is kept whole if there are few of them, none writes in place, and none draws random numbers.

Fake tensors are contiguous; real ones need not be. :data:`FOR_ALL_STRIDES` replaces operators that need contiguous inputs.

Alternative: ``make_fx`` records the same, but while it runs, it changes ``torch.nn.Module`` for all threads of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..ir.observation import draws, fake_arguments, fake_mode, named_arguments
from ..private_torch import schema_of

aten = torch.ops.aten


def _copying(operator: Any, fits: Callable[[Tensor], bool]) -> Callable[..., Any]:
    """Return a function that calls an operator with contiguous copies of tensor arguments that do not fit."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*(a.contiguous() if isinstance(a, Tensor) and not fits(a) else a for a in args), **kwargs)

    return call


def _has_adjacent_elements(tensor: Tensor) -> bool:
    """Return whether the elements of each head lie next to each other."""
    return tensor.stride(-1) == 1


FOR_ALL_STRIDES: dict[Any, Callable[..., Any]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    **{
        operator: _copying(operator, Tensor.is_contiguous)
        for operator in (
            aten.native_layer_norm_backward.default,
            aten.native_group_norm.default,
            aten.native_group_norm_backward.default,
            aten.nll_loss2d_backward.default,
            aten._pdist_forward.default,
            aten._pdist_backward.default,
        )
    },
    **{
        operator: _copying(operator, _has_adjacent_elements)
        for operator in (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    },
}
"""Functions that accept all strides, keyed by the operators that they replace."""


_ALIASES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
"""Operators whose result is recorded as their input. This is safe because no operator writes in place."""

_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
"""Operators that do not count towards ``_MAX_OPERATORS``."""

_MAX_OPERATORS = 10
"""The most base operators, forward and backward, of a function that is kept whole. Self-attention with a boolean mask takes
seven, and the quotient of two tensors with different dtypes and shapes ten."""


class _Value(NamedTuple):
    """A tensor of a program."""

    number: int


class _OperatorCall(NamedTuple):
    """A call of a base operator, with a ``_Value`` for each tensor among its arguments and results."""

    operator: Any
    args: Any
    kwargs: Any
    results: Any

    def reads(self) -> Iterator[_Value]:
        return _values((self.args, self.kwargs))


class TorchProgram(NamedTuple):
    """The base operators of a function and its gradient.

    Attributes:
        steps: the calls of operators, in the order in which torch makes them.
        inputs: the tensor arguments of the function, each once.
        result: the tensor that the function returns.
        grad: the gradient of the result.
        grads: the gradients of inputs, ``None`` for those without.
        forward: the numbers of the steps that compute the result.
    """

    steps: Sequence[_OperatorCall]
    inputs: Sequence[_Value]
    result: _Value
    grad: _Value
    grads: Sequence[_Value | None]
    forward: frozenset[int]

    def run(self, call: Callable[..., Any], inputs: Sequence[Any], grad: Callable[[Any], Any] | None) -> Any:
        """Call the operators, and return the result and the gradients of inputs.

        Args:
            call: calls an operator with arguments.
            inputs: the tensor arguments.
            grad: returns the gradient of the result; ``None`` to run forward alone.
        """
        known: dict[_Value, Any] = dict(zip(self.inputs, inputs, strict=True))
        for number, step in enumerate(self.steps):
            if grad is None and number not in self.forward:
                continue
            if grad is not None and self.grad not in known and self.grad in step.reads():
                known[self.grad] = grad(known[self.result])
            args, kwargs = _with((step.args, step.kwargs), known)
            results = call(step.operator, *args, **kwargs)
            pairs = (
                zip(step.results, results, strict=True) if type(step.results) is tuple else [(step.results, results)]
            )
            known.update((value, result) for value, result in pairs if value is not None)
        if grad is None:
            return known[self.result], ()
        if self.grad not in known:  # no step reads it, as in a sum, whose operands have the same gradient
            known[self.grad] = grad(known[self.result])
        return known[self.result], tuple([None if each is None else known[each] for each in self.grads])


def torch_program(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    spec: Any,
    device: str,
    named: Sequence[str],
    differentiable: Sequence[bool],
) -> TorchProgram | None:
    """Return what torch runs for a call of ``function``; ``None`` if it cannot be kept whole.

    Args:
        arguments: as ``observation.describe`` returns them.
        device: the device type of the tensors.
        named: names of the last arguments; the others are positional.
        differentiable: for each distinct tensor argument, whether its gradient is wanted.
    """
    try:
        with fake_mode(device):
            given, _ = fake_arguments(arguments, spec)
            count = len(given) - len(named)
            by_name = dict(zip(named, given[count:], strict=True))
            program = _record(function, given[:count], by_name, differentiable)
    except Exception:  # torch refuses the call, or fake tensors: leave it to Thunder
        return None
    if program.result in program.inputs or not all(any(_values(step.results)) for step in program.steps):
        return None  # an operator without a result checks something, and a trace would drop it
    if any(differentiable) and all(each is None for each in program.grads):
        return None  # autograd still lets the result require a gradient
    called = [step.operator for step in program.steps if step.operator not in _VIEWS]
    if len(called) > _MAX_OPERATORS or not all(map(_is_functional, program.steps)):
        return None
    if any(each is not None and not _depends(program.steps, each, program.grad) for each in program.grads):
        return None  # zeros, as for `x**0`: Thunder passes on only gradients that are computed from the result's
    steps = [step._replace(operator=FOR_ALL_STRIDES.get(step.operator, step.operator)) for step in program.steps]
    return program._replace(steps=steps)


def _record(function: Callable[..., Any], args: Any, kwargs: Any, differentiable: Sequence[bool]) -> TorchProgram:
    inputs = list({id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values())
    for tensor, is_wanted in zip(inputs, differentiable, strict=True):
        tensor.requires_grad_(is_wanted)
    recorder = _CallRecorder(inputs)
    with torch.enable_grad(), recorder:
        result = function(*args, **kwargs)
    if any(tensor.is_complex() for tensor in (*inputs, result)):
        raise NotImplementedError  # torch may conjugate later, and not all operators accept that
    number = len(recorder.steps)
    grad = torch.empty_like(result, memory_format=torch.contiguous_format)
    of_grad = recorder.value(grad, is_new=True)
    wanted = [tensor for tensor, is_wanted in zip(inputs, differentiable, strict=True) if is_wanted]
    with recorder:
        grads = iter(torch.autograd.grad(result, wanted, grad, allow_unused=True) if wanted else ())
    of_inputs = [next(grads) if is_wanted else None for is_wanted in differentiable]
    return TorchProgram(
        recorder.steps,
        [recorder.value(tensor) for tensor in inputs],
        recorder.value(result),
        of_grad,
        [None if each is None else recorder.value(each) for each in of_inputs],
        _needed(recorder.steps[:number], recorder.value(result)),
    )


class _CallRecorder(TorchDispatchMode):
    """A dispatch mode that records the base operators that run under it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[_OperatorCall] = []
        self._values: dict[int, _Value] = {}
        self._alive: list[torch.Tensor] = []  # so that no tensor gets the `id` of an earlier one
        for tensor in inputs:
            self.value(tensor, is_new=True)

    def value(self, tensor: torch.Tensor, *, is_new: bool = False) -> _Value:
        """Return the value that stands for a tensor.

        Raises:
            KeyError: it is no input, and no recorded operator has returned it.
        """
        if is_new:
            self._stands_for(tensor, _Value(len(self._alive)))
        return self._values[id(tensor)]

    def _stands_for(self, tensor: torch.Tensor, value: _Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read_args, read_kwargs = tree_map_only(torch.Tensor, self.value, (args, kwargs or {}))
        if func in _ALIASES:
            self._stands_for(out, read_args[0])
        elif func.namespace != "prim":  # such as a query of the device
            results = tree_map_only(torch.Tensor, lambda tensor: self.value(tensor, is_new=True), out)
            self.steps.append(_OperatorCall(func, read_args, read_kwargs, results))
        return out


def _is_functional(step: _OperatorCall) -> bool:
    """Return whether an operator writes nothing in place and draws no random numbers."""
    operator = step.operator
    if operator.namespace != "aten" or schema_of(operator).is_mutable:
        return False
    return not draws(operator, named_arguments(operator, step.args, step.kwargs))


def _needed(steps: Sequence[_OperatorCall], result: _Value) -> frozenset[int]:
    """Return the numbers of the steps that compute ``result``."""
    return frozenset(_ancestors(steps, result)[0])


def _depends(steps: Sequence[_OperatorCall], result: _Value, value: _Value) -> bool:
    return value in _ancestors(steps, result)[1]


def _ancestors(steps: Sequence[_OperatorCall], result: _Value) -> tuple[set[int], set[_Value]]:
    """Return the numbers of the steps that compute ``result``, and a set of ``result`` and the values that they read."""
    values, numbers = {result}, set()
    for number in reversed(range(len(steps))):
        if values.intersection(_values(steps[number].results)):
            numbers.add(number)
            values.update(steps[number].reads())
    return numbers, values


def _values(tree: Any) -> Iterator[_Value]:
    return (leaf for leaf in tree_leaves(tree, is_leaf=_is_value) if isinstance(leaf, _Value))


def _with(tree: Any, known: Mapping[_Value, Any]) -> Any:
    return tree_map_only(_Value, known.__getitem__, tree, is_leaf=_is_value)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, _Value)
