"""A call of a leaf module or function: its arguments and results, and the names of the module's parameters."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ...errors import coded_error
from ...sharding.module_parameters import replace_in_containers, tensors_in_containers


class Metadata(NamedTuple):
    """The properties of a tensor that a trace knows.

    Attributes:
        differentiable: whether gradients pass through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool


class _TensorPlace:
    def __repr__(self) -> str:
        return "a tensor"


TENSOR = _TensorPlace()
"""Stands for a tensor among the flat arguments or results of a call."""


class Nested(NamedTuple):
    """Nested arguments or results: tensors in the places of :data:`TENSOR`, and constants."""

    flat: tuple[Any, ...]
    spec: Any

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the nested values with these tensors."""
        values = iter(tensors)
        return tree_unflatten([next(values) if each is TENSOR else each for each in self.flat], self.spec)


class NamedParameter(NamedTuple):
    """A name under which a submodule has a parameter.

    Attributes:
        number: the number of the parameter among the leaf's distinct parameters.
    """

    owner: torch.nn.Module
    key: str
    number: int


_OBSERVED = (
    *("outputs", "results", "flops", "sharing", "returned", "writes", "kept"),
    *("saved_bytes", "forward_bytes", "backward_bytes", "recomputing_bytes"),
)
"""The attributes of a leaf that are observed in a run on other values."""


class Leaf:
    """A call of a leaf module, or of a function that runs as it is: the opaque argument of ``fsdp_leaf``.

    Args:
        path: the path of the module in the model, or the name of the function.
        function: the function, or the module itself.
        entries: all names of the module's parameters.
        inputs, parameters: the tensors that the call reads.
        arguments: the nesting of its arguments, and its constants.
        autocasts: arguments of ``torch.autocast``, the outermost first.

    Attributes:
        sharded: the numbers of its sharded parameters, whose memory is gathered for one run. The others are ignored ones.
        name: its name in traces.
        traced_name: its name in the computation before ``prepare_leaves``.
        names: the names of all calls in traces.
        needs: whether the gradient of each input, and then of each parameter, is needed; empty before ``prepare_leaves``.
        outputs, results: the tensors that it returns, and their nesting, with constants.
        recomputes: whether backward runs its forward again, so that autograd saves only its inputs.
        sharing: the numbers of outputs that share memory with an input, an attribute or another output, as observed
            once. The trace gets copies of those that share memory with inputs.
        returned: the paths of buffers and other attributes of the leaf that share memory with an output, as observed once.
        writes: the attributes that it changed when it was observed, each with the path of its module in the leaf.
        communicates: whether it may communicate: a function of the user gives its outputs, and no run was observed.
        kept: the numbers of the inputs, and then of the outputs, that autograd keeps for backward, as observed once.
        saved_bytes: bytes that autograd keeps besides these and the parameters.
        forward_bytes, backward_bytes: the peak of all other bytes in forward and in backward, its results included.
        recomputing_bytes: the same for a backward that runs forward again.
        flops: floating-point operations of a forward by dtype, by the formulas of ``torch.utils.flop_counter``.
    """

    outputs: tuple[Metadata, ...]
    results: Nested
    name = traced_name = ""
    needs: tuple[bool, ...] = ()
    names: set[str]
    recomputes = communicates = False
    sharing: frozenset[int] = frozenset()
    returned: frozenset[str] = frozenset()
    writes: frozenset[tuple[str, str]] = frozenset()
    saved_bytes = forward_bytes = backward_bytes = recomputing_bytes = 0
    flops: Mapping[torch.dtype, int] = MappingProxyType({})

    def __init__(
        self,
        path: str,
        function: Callable[..., Any],
        entries: Sequence[NamedParameter],
        inputs: Sequence[Metadata],
        parameters: Sequence[Metadata],
        arguments: Nested,
        autocasts: Sequence[tuple[str, torch.dtype | None, bool]],
    ) -> None:
        self.path, self.function, self.entries = path, function, tuple(entries)
        self.inputs, self.parameters = tuple(inputs), tuple(parameters)
        self.arguments, self.autocasts = arguments, tuple(autocasts)
        self.kept = frozenset(range(len(self.inputs)))
        self._variants: dict[Any, Leaf] = {}
        self.sharded = {number for owner, key, number in entries if owner.get_parameter(key).is_meta}  # placeholders
        own = {id(entry.owner._parameters[entry.key]) for entry in entries}
        self._is_in_containers = any(
            id(tensor) in own for module in self.modules for _, tensor in tensors_in_containers(module)
        )

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The module; empty for a function."""
        return (self.function,) if isinstance(self.function, torch.nn.Module) else ()

    @property
    def text_to_compare(self) -> str:
        """The text that ranks compare."""
        return " ".join((self.path, *(type(module).__name__ for module in self.modules)))

    @property
    def title(self) -> str:
        """Its name in messages."""
        kinds = [type(module).__name__ for module in self.modules]
        return f"leaf module {self.path!r} ({kinds[0]})" if kinds else f"leaf function {self.path!r}"

    def take_observations(self, other: Leaf) -> None:
        """Copy the observations of an equal call of a similar module."""
        for name in _OBSERVED:
            setattr(self, name, getattr(other, name))

    def flops_of(self, symbol: str) -> dict[torch.dtype, int]:
        """Return the floating-point operations of a symbol that runs it, by dtype: a backward counts as two forwards."""
        return {dtype: flops * (2 if symbol.endswith("backward") else 1) for dtype, flops in self.flops.items()}

    def bytes_of(self, symbol: str) -> int:
        """Return the peak of bytes while a symbol runs it: results are included, bytes saved for backward are not."""
        if symbol.endswith("backward"):
            return self.backward_bytes
        return self.forward_bytes + (0 if symbol.endswith("forward") else self.saved_bytes)

    @property
    def is_differentiable(self) -> bool:
        """Whether an output has a gradient."""
        return any(known.differentiable for known in self.outputs)

    def give_name(self, names: set[str]) -> None:
        """Give this call a name in traces that no other call has."""
        base = self.name or "leaf_" + re.sub(r"\W", "_", self.path)  # the same for `a.b` and `a_b`
        numbered = (f"{base}_{number}" for number in range(1, len(names) + 2))
        self.name = next(name for name in (base, *numbered) if name not in names)
        self.names = names
        names.add(self.name)

    def needing(self, needs: tuple[bool, ...], *, recomputes: bool) -> Leaf:
        """Return a variant of this call that computes the needed gradients."""
        key = needs, recomputes
        if key not in self._variants:
            other = self._variants[key] = object.__new__(Leaf)
            vars(other).update(vars(self), needs=needs, recomputes=recomputes)
            if recomputes:
                other.saved_bytes, other.kept = 0, frozenset(range(len(self.inputs)))
                other.forward_bytes += self.saved_bytes
                other.backward_bytes = self.recomputing_bytes
            if len(self._variants) > 1:
                other.give_name(self.names)
        return self._variants[key]

    @contextlib.contextmanager
    def bound(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """In this context, let the module have these parameters."""
        former = [owner._parameters[key] for owner, key, _ in self.entries]
        self._replace(former, [parameters[index] for _, _, index in self.entries])
        try:
            yield
        finally:
            self._replace([parameters[index] for _, _, index in self.entries], former)

    def _replace(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        for (owner, key, _), parameter in zip(self.entries, new, strict=True):
            owner._parameters[key] = parameter
        if self._is_in_containers:  # as in `nn.LSTM._flat_weights`
            for module in self.modules:
                replace_in_containers(module, dict(zip(map(id, old), new, strict=True)))

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            yield

    def call(self, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> Any:
        """Call the module."""
        args, kwargs = self.arguments.fill(inputs)
        with self.bound(parameters), self._autocast() if self.autocasts else contextlib.nullcontext():
            if self.recomputes and torch.is_grad_enabled():
                return checkpoint(self.function, *args, use_reentrant=False, **kwargs)
            return self.function(*args, **kwargs)

    def tensors_in(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result.

        Raises:
            RuntimeError: it has another structure, or other metadata, than the trace knows.
        """
        flat, spec = tree_flatten(result)
        found = [each for each in flat if isinstance(each, torch.Tensor)]
        constants = tuple(TENSOR if isinstance(each, torch.Tensor) else each for each in flat)
        if spec != self.results.spec or constants != self.results.flat:
            self.fail("leaf.returns-another-structure", got=constants, spec=spec, expected=self.results)
        for number, (tensor, known) in enumerate(zip(found, self.outputs, strict=True)):
            actual = tuple(tensor.shape), tensor.dtype, tensor.device.type
            expected = known.shape, known.dtype, known.device.type
            if actual != expected:
                self.fail("leaf.returns-another-shape", actual=actual, number=number, expected=expected)
            if tensor.requires_grad and not known.differentiable:
                self.fail("leaf.returns-unexpected-gradient", number=number, path=self.path)
        return found

    @functools.cached_property
    def stand_in(self) -> torch.Tensor:
        """The tensor that stands for inputs and parameters in autograd."""
        known = next(itertools.compress((*self.inputs, *self.parameters), self.needs))
        return torch.empty(0, device=known.device, requires_grad=True)

    def name_of(self, number: int) -> str:
        """Return the name of a parameter in the leaf."""
        names: Mapping[torch.nn.Module, str] = {
            module: path for root in self.modules for path, module in root.named_modules()
        }
        entry = next(entry for entry in self.entries if entry.number == number)
        return f"{names[entry.owner]}.{entry.key}".lstrip(".")

    def fail(self, code: str, **values: object) -> NoReturn:
        """Raise an error whose text begins with the title of the leaf."""
        raise coded_error(RuntimeError, code, title=self.title, **values)
