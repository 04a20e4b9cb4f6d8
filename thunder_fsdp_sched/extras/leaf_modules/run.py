"""Run a leaf module: its own forward, and torch's autograd for its backward.

[Note: Leaf modules]
A leaf is not traced. Its call is one operator, ``fsdp_leaf``, which reads the inputs and the unsharded parameters. Its
grad rule replaces it by two: ``fsdp_leaf_forward`` runs the module with gradients and returns its autograd graph as an
opaque value; ``fsdp_leaf_backward`` runs that graph, and reads the parameters, too, so that the schedule gathers them again.

Between the two, the slots of the parameters hold other buckets. So the graph must not refer to their memory:

- Where autograd saves a view of a parameter, ``saved_tensors_hooks`` save only its position there. Backward finds it again
  in the parameters that it has gathered.
- Autograd knows parameters as results of a function of a *stand-in* without memory. That function gets their gradients.
- Each parameter gets a storage of its own for one run. If it still exists after forward, something else keeps it: an
  attribute of a custom function's context, or of the module. That is an error, because backward would read another bucket.
  (The number of a lasting storage's owners would not tell: the storage as an object of Python is one owner in any case, and
  a module may replace what it has kept in an earlier call that failed.)

A write to a parameter would be lost with the slot. The parameter's version shows it: writes through ``.data`` change the
version, too (:class:`_GivenParameter`), and parameters have one in inference mode as well.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ...private_torch import hooks_of, is_shared, keeps_graph, run_backward
from ...runtime.memory import with_own_storage
from .leaf import Leaf


class _Bind(torch.autograd.Function):
    """Give inputs and parameters to a leaf as results of a stand-in, and take their gradients."""

    @staticmethod
    def forward(
        ctx: Any, packing: _Packing, tensors: list[torch.Tensor], stand_in: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.packing = packing
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        if ctx.packing.gradients is None:
            ctx.packing.fail_outside()
        ctx.packing.add(grads)  # again in each backward that a node of the graph runs, such as a reentrant checkpoint's
        return None, None, None


class _GivenParameter(torch.nn.Parameter):
    """An unsharded parameter. Writes through ``.data`` change its version, too."""

    data = property(torch.Tensor.detach, torch.Tensor.data.__set__)  # type: ignore[attr-defined]


class _Place(NamedTuple):
    """The position of a tensor in the memory of a parameter.

    Attributes:
        offset: from the beginning of the parameter, in elements of this dtype.
    """

    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def find_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this position of a parameter, which may have been gathered into other memory since."""
        if parameter.dtype != self.dtype:
            storage = with_own_storage(parameter).untyped_storage()
            return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
                storage, self.offset, self.size, self.stride
            )
        if self.stride == parameter.stride() and self.size == parameter.size():
            return parameter
        return parameter.as_strided(self.size, self.stride, self.offset + int(parameter.storage_offset()))


class _Packing:
    """The hooks for tensors that autograd saves in one forward of a leaf. The graph keeps them, so they do not refer to it.

    Attributes:
        numbers: the numbers of parameters, by the addresses of their storages; empty once forward has run.
        memory: the parameters, during forward and backward.
        gradients: those found so far, of the inputs and parameters that need one; ``None`` except while :func:`backward`
            runs.
    """

    def __init__(self, leaf: Leaf, numbers: dict[int, int]) -> None:
        self.leaf, self.numbers = leaf, numbers
        self.memory: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] | None = None

    def fail_outside(self) -> NoReturn:
        """Raise the error for gradients that would be lost."""
        self.leaf.fail("leaf.gradients-outside-backward")

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add to the gradients of the inputs and parameters that need one."""
        assert self.gradients is not None
        for number, (former, grad) in enumerate(zip(self.gradients, grads, strict=True)):
            self.gradients[number] = former if grad is None else grad if former is None else former + grad

    def pack(self, tensor: torch.Tensor) -> Any:
        try:
            index = self.numbers.get(tensor.untyped_storage().data_ptr()) if self.numbers else None
        except (RuntimeError, NotImplementedError):  # it has no storage: a fake tensor, while a compiler traces
            return tensor
        if index is None or not tensor.numel():
            return tensor.detach(), tensor._version  # a result with its node would be in a reference cycle
        if tensor.is_conj() or tensor.is_neg():
            return tensor.resolve_conj().resolve_neg().clone()
        return _Place(index, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Place):
            if not self.memory:
                self.fail_outside()
            return packed.find_in(self.memory[packed.number])
        if isinstance(packed, torch.Tensor):
            return packed
        tensor, version = packed
        if tensor._version != version:
            self.leaf.fail("leaf.saved-tensor-changed")
        return tensor


class LeafState:
    """The state that forward of a leaf leaves for backward.

    Attributes:
        name: the name of the leaf in the computation.
        edges: the outputs' edges in autograd's graph; ``None`` once a backward has run that does not keep the graph.
        used: for each output, the identities of the parameters that it depends on; see [Note: Outputs without gradient] in
            ``runtime.unused_outputs``.
        connected: the numbers of the inputs and, after them, of the parameters that an output depends on.
    """

    def __init__(self, leaf: Leaf, packing: _Packing) -> None:
        self.name, self.packing = leaf.traced_name, packing
        self.edges: list[Any] | None = []
        self.used: list[frozenset[int]] = []
        self.connected: set[int] = set()


def _of_type(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    tensor.__class__ = kind
    return tensor


class _LeafCall:
    """One call of a leaf: its tensors, and the checks after it."""

    def __init__(self, leaf: Leaf, tensors: Sequence[torch.Tensor]) -> None:
        count = len(leaf.inputs)
        self.leaf = leaf
        self.given = tensors[:count]
        self.versions = [None if t.is_inference() else t._version for t in self.given]
        with torch.inference_mode(False):
            self.parameters = [_of_type(_GivenParameter, with_own_storage(t)) for t in tensors[count:]]
        storages = [parameter.untyped_storage() for parameter in self.parameters]
        self.pointers = {storage.data_ptr(): i for i, storage in enumerate(storages) if storage.nbytes()}
        self.alive = list(map(StorageWeakRef, storages))
        self.first_version = [p._version for p in self.parameters]

    def outputs(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for the trace, as copies if they may share memory with an input or a parameter."""
        strided = [t for t in self.given if t.layout is torch.strided]
        known = self.pointers.keys() | {t.untyped_storage().data_ptr() for t in strided}
        may_share = len(strided) < len(self.given)  # such as the values of a sparse tensor
        return [
            t.detach().clone() if t.numel() and (may_share or t.untyped_storage().data_ptr() in known) else t.detach()
            for t in results
        ]

    def check_memory(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check that no parameter has other memory than before (``weight.data = other``), which would be lost."""
        for number, (parameter, own) in enumerate(zip(parameters, self.alive, strict=True)):
            if StorageWeakRef(parameter.untyped_storage()) != own:
                if number in self.leaf.sharded:
                    self.leaf.fail("leaf.parameter-changed-in-place", name=self.leaf.name_of(number))
                self.leaf.fail("leaf.ignored-parameter-replaced", name=self.leaf.name_of(number))

    def check(self) -> None:
        """Check that no input and no sharded parameter was changed in place."""
        leaf = self.leaf
        for number, (tensor, version) in enumerate(zip(self.given, self.versions, strict=True)):
            if version is not None and tensor._version != version:
                leaf.fail("leaf.changes-input-in-place", number=number)
        for number, (parameter, version) in enumerate(zip(self.parameters, self.first_version, strict=True)):
            if number in leaf.sharded and parameter._version != version:
                leaf.fail("leaf.parameter-changed-in-place", name=leaf.name_of(number))
        self.parameters.clear()

    def check_freed(self) -> None:
        """Check that nothing keeps the memory of a parameter."""
        if not all(each.expired() for each in self.alive):
            gc.collect()
            kept = [i for i, each in enumerate(self.alive) if not each.expired()]
            if kept:
                self.leaf.fail("leaf.parameter-kept", name=self.leaf.name_of(kept[0]))


def run(leaf: Leaf, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call a leaf without gradients.

    If an input or parameter needs a gradient, but no output had one when the leaf was observed, check that none has one now.
    """
    one = _LeafCall(leaf, tensors)
    with torch.set_grad_enabled(any(leaf.needs)):
        given = [*one.given, *one.parameters]
        for number in (number for number, is_needed in enumerate(leaf.needs) if is_needed):
            given[number] = _of_type(type(given[number]), given[number].detach().requires_grad_())
        outputs = one.outputs(leaf.tensors_in(leaf.call(given[: len(one.given)], given[len(one.given) :])))
        one.check_memory(given[len(one.given) :])
        del given
    one.check()
    one.check_freed()
    return tuple(outputs)


def forward(leaf: Leaf, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Call a leaf, and return its outputs and the state for its backward."""
    one = _LeafCall(leaf, tensors)
    packing = _Packing(leaf, one.pointers)
    state, count = LeafState(leaf, packing), len(leaf.inputs)
    with torch.enable_grad(), saved_tensors_hooks(packing.pack, packing.unpack):
        given = [*(t.detach() for t in one.given), *one.parameters]
        numbers = [i for i, is_needed in enumerate(leaf.needs) if is_needed]
        bound = _Bind.apply(packing, [given[i] for i in numbers], leaf.stand_in)
        for i, tensor in zip(numbers, bound, strict=True):
            given[i] = _of_type(type(given[i]), tensor)
        binding = bound[0].grad_fn
        del bound, tensor
        packing.memory = one.parameters  # for torch.autograd.grad in forward
        results = leaf.tensors_in(leaf.call(given[:count], given[count:]))
        packing.memory = []
        one.check_memory(given[count:])
        hooked = [i for i, tensor in enumerate(given[count:]) if any(hooks_of(tensor))]
        state.edges = [get_gradient_edge(t) if t.requires_grad else None for t in results]
        outputs = one.outputs(results)
    del results, given
    shards = {index: id(owner._parameters[key]) for owner, key, index in leaf.entries}
    for edge in state.edges:
        connected = {numbers[i] for i in _used(edge, binding, len(numbers))}
        state.connected |= connected
        state.used.append(frozenset(shards[number - count] for number in connected if number >= count))
    del binding
    if hooked:
        leaf.fail("leaf.hook-of-parameter-in-forward", name=leaf.name_of(hooked[0]))
    one.check()
    one.check_freed()
    packing.numbers = {}
    return *outputs, state


def _used(edge: Any, binding: Any, count: int) -> set[int]:
    """Return the numbers of those results of the node ``binding``, of ``count``, on which the output of ``edge`` depends."""
    if edge is None or edge.node is binding:
        return set() if edge is None else {edge.output_nr}
    found, nodes = set[int](), [edge.node]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == "CheckpointFunctionBackward":  # a reentrant checkpoint, whose graph exists only in backward
            return set(range(count))
        for following, number in node.next_functions:
            if following is binding:
                found.add(number)
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def backward(leaf: Leaf, state: LeafState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the inputs and parameters that need one.

    Args:
        tensors: the parameters, then the gradients of the differentiable outputs.
    """
    if state.edges is None:
        leaf.fail("leaf.second-backward")
    keeps = keeps_graph()
    count, inputs = len(leaf.parameters), len(leaf.inputs)
    state.packing.memory = list(tensors[:count])
    parameters = [tensor.detach() for tensor in state.packing.memory]
    cotangents = iter(tensors[count:])
    pairs = [
        (edge, next(cotangents))
        for edge, known in zip(state.edges or (), leaf.outputs, strict=True)
        if known.differentiable
    ]
    pairs = [(edge, cotangent) for edge, cotangent in pairs if edge is not None]
    for parameter, is_needed in zip(parameters, leaf.needs[inputs:], strict=True):
        parameter.requires_grad_(is_needed)
        parameter._is_param = True
    numbers = [number for number, is_needed in enumerate(leaf.needs) if is_needed]
    grads: list[torch.Tensor | None] = [None] * len(numbers)
    state.packing.gradients = grads
    try:
        if pairs:
            # A region of torch.utils.checkpoint in the module reads the parameters again. A reentrant one, which
            # `autograd.grad` does not support, accumulates their gradients itself.
            with leaf.bound(parameters):
                edges, gradients = zip(*pairs, strict=True)
                run_backward(edges, gradients, keeps)
            state.packing.add([parameters[i - inputs].grad if i >= inputs else None for i in numbers])
    finally:
        state.packing.memory, state.packing.gradients = [], None
        if not keeps:
            state.edges = None
    for number, grad in zip(numbers, grads, strict=True):
        if grad is not None and number >= inputs and number not in state.connected:
            leaf.fail("leaf.gradient-without-path", name=leaf.name_of(number - inputs))
    if any(grad is not None and grad.layout is not torch.strided for grad in grads):
        leaf.fail("leaf.sparse-gradient")
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    own = []
    for number, grad in zip(numbers, grads, strict=True):
        if grad is None:
            known = (*leaf.inputs, *leaf.parameters)[number]
            grad = torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)
        elif grad.numel():
            # A view of a parameter, for example, would be lost with its slot.
            is_lent = grad.untyped_storage().data_ptr() in given
            # Autograd may get it from the trace, and add later gradients to it in place.
            is_lent |= number - inputs not in leaf.sharded and is_shared(grad)
            grad = grad.clone() if is_lent else grad
        own.append(grad)
    return tuple(own)
