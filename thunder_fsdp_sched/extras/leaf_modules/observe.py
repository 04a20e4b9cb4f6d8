"""Observe what a leaf module returns, changes and keeps, in a run on other values."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import torch
from thunder.core.proxies import Proxy
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ...capture.module_members import OF_MODULES
from ...errors import coded_error
from ...ir.observation import Recorder
from ...runtime.memory import same_bytes
from ...sharding.module_parameters import tensors_in_containers
from .leaf import TENSOR, Leaf, Metadata, Nested


class LeafError(NotImplementedError):
    """An action of a leaf that the schedule cannot allow."""


class _WithoutCommunication(TorchDispatchMode):
    """A dispatch mode that refuses collectives, through any of torch's interfaces."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self._leaf = leaf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"):
            raise coded_error(
                LeafError, "leaf.communicates", title=self._leaf.title, operator=func.name(), path=self._leaf.path
            )
        return func(*args, **(kwargs or {}))


def is_plain(value: Any) -> bool:
    """Return whether a value may be passed to a leaf, or returned, besides tensors."""
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, Enum, slice)
    return value is None or (isinstance(value, plain) and not isinstance(value, Proxy))


def observe(leaf: Leaf, output_like: Callable[..., Any] | None, examples: Mapping[int, torch.Tensor]) -> None:
    """Determine what a leaf returns: from ``output_like``, or from a run on fake tensors or, if that fails, on real ones.

    Args:
        examples: values of inputs, by their numbers; a run on real tensors takes random ones for all others.

    Raises:
        NotImplementedError: all of them fail.
    """
    if output_like is not None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            args, kwargs = leaf.arguments.fill([_empty(m) for m in leaf.inputs])
            _note(leaf, output_like(*args, **kwargs), is_given=True)
        leaf.communicates = True
        return
    try:
        _observe(leaf, {}, is_fake=True)
    except LeafError:
        raise
    except Exception as fake:  # the module may run any code
        if not leaf.modules and isinstance(fake, DynamicOutputShapeException):
            raise
        try:
            _observe(leaf, examples, is_fake=False)
        except LeafError:
            raise
        except Exception as real:
            is_own = (type(real), str(real)) == (type(fake), str(fake)) or len(examples) == len(leaf.inputs) > 0
            if is_own:  # an error of the program
                raise
            raise coded_error(
                NotImplementedError,
                "leaf.outputs-not-known",
                title=leaf.title,
                fake_type=type(fake).__name__,
                fake_error=fake,
                real_type=type(real).__name__,
                real_error=real,
                path=leaf.path,
            ) from real


def run_once(leaf: Leaf, examples: Mapping[int, torch.Tensor]) -> None:
    """Run a leaf on real tensors, if it is on a device of this machine, so that an exception of its own shows."""
    tensors = (*leaf.inputs, *leaf.parameters)
    if all(_real_device(metadata.device) == metadata.device for metadata in tensors):
        _observe(leaf, examples, is_fake=False)


def _observe(leaf: Leaf, examples: Mapping[int, torch.Tensor], *, is_fake: bool) -> None:
    devices = {m.device for m in (*leaf.inputs, *leaf.parameters) if m.device.type != "cpu"}
    numbers = torch.Generator().manual_seed(0)
    make = _empty if is_fake else lambda metadata: _random(metadata, numbers)
    saved: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(_unchanged(leaf, mode.from_tensor if is_fake else _real_copy))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        kind = next((device.type for device in devices), "cuda")
        stack.enter_context(torch.random.fork_rng(list(devices), device_type=kind))
        if is_fake:
            stack.enter_context(mode)
        stack.enter_context(_WithoutCommunication(leaf))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = [
            (examples[i].detach().to(_real_device(m.device), m.dtype, copy=True) if i in examples else make(m))
            for i, m in enumerate(leaf.inputs)
        ]
        for tensor, m in zip(inputs, leaf.inputs, strict=True):
            tensor.requires_grad_(m.differentiable)
        parameters = [torch.nn.Parameter(make(m), m.differentiable) for m in leaf.parameters]
        given_inputs = [t.clone() for t in inputs]  # not leaves of autograd
        inputs_memory = set(map(memory_of, given_inputs))
        given = inputs_memory.union(map(memory_of, parameters))

        def count(tensor: torch.Tensor) -> torch.Tensor:
            key = memory_of(tensor)
            if key not in given:
                saved[key] = _storage_of(tensor).nbytes()
            return tensor.detach()  # with its node, a result would be in a reference cycle

        recorder = Recorder([*given_inputs, *parameters])
        before = [] if is_fake else [tensor.detach().clone() for tensor in (*given_inputs, *parameters)]
        with saved_tensors_hooks(count, lambda tensor: tensor), recorder:
            result = leaf.call(given_inputs, parameters)
        with torch.no_grad():  # no operator writes through an array of NumPy
            pairs = enumerate(zip((*given_inputs, *parameters), before, strict=False))
            changed = (n for n, (now, then) in pairs if now.layout is torch.strided and not same_bytes(now, then))
            recorder.writes.update(changed)
            del pairs, changed  # they keep inputs alive
        for number in sorted(recorder.writes):  # through any alias, also one with a version of its own (`.data`)
            if number < len(given_inputs):
                raise coded_error(LeafError, "leaf.changes-input-in-place", title=leaf.title, number=number)
            if (parameter := number - len(given_inputs)) in leaf.sharded:
                name = leaf.name_of(parameter)
                raise coded_error(LeafError, "leaf.parameter-changed-in-place", title=leaf.title, name=name)
        _note(leaf, result, reads_data=not is_fake)
        outputs_memory = [memory_of(t) for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        state = {path: memory_of(tensor) for path, tensor in state_of(leaf)}
        leaf.returned = frozenset(path for path, memory in state.items() if memory in outputs_memory)
        outside = inputs_memory.union(state.values())
        leaf.sharing = frozenset(
            n for n, memory in enumerate(outputs_memory) if memory in outside or outputs_memory.count(memory) > 1
        )
        storages = [StorageWeakRef(t.untyped_storage()) for t in given_inputs]
        del given_inputs
        keeps = [*(not storage.expired() for storage in storages), *(key in saved for key in outputs_memory)]
        leaf.kept = frozenset(number for number, is_kept in enumerate(keeps) if is_kept)
        leaf.saved_bytes = sum(nbytes for key, nbytes in saved.items() if key not in outputs_memory)
        leaf.flops = dict(recorder.flops)
        forward_peak = recorder.peak_bytes
        leaf.forward_bytes = max(forward_peak - leaf.saved_bytes, 0)
        if is_fake:
            leaf.backward_bytes = _observe_backward(result, recorder) - leaf.saved_bytes
        else:  # an upper bound, because a run of backward would itself take this memory
            nbytes = sum(t.nbytes for t in (*inputs, *parameters))
            leaf.backward_bytes = leaf.forward_bytes + leaf.saved_bytes + nbytes
        leaf.recomputing_bytes = max(forward_peak, leaf.backward_bytes + sum(saved.values()))


def state_of(leaf: Leaf) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a leaf, and the tensors among its other attributes, each with its path in the leaf."""
    for module in leaf.modules:
        yield from module.named_buffers(remove_duplicate=False)
        yield from tensors_in_containers(module)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors which share memory have in common."""
    return StorageWeakRef(_storage_of(tensor)).cdata


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the values of a sparse one."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return tensor.untyped_storage()


def _observe_backward(result: Any, recorder: Recorder) -> int:
    """Run backward; return the most bytes that exist during it besides the results of forward."""
    outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    storages = {StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in outputs}
    outputs = [t for t in outputs if t.requires_grad]
    gradients = list(map(torch.empty_like, outputs))
    # Views of these need no memory.
    recorder.inputs.update((StorageWeakRef(t.untyped_storage()), frozenset()) for t in gradients)
    recorder.peak_bytes = 0
    try:
        with recorder:
            torch.autograd.backward(outputs, gradients)
    except LeafError:
        raise
    except Exception:  # it has no backward, as that of a training step will say
        return 0
    return recorder.peak_bytes - sum(storages.values())


def _note(leaf: Leaf, result: Any, *, is_given: bool = False, reads_data: bool = False) -> None:
    flat, spec = tree_flatten(result)
    device = next((m.device for m in (*leaf.inputs, *leaf.parameters)), torch.device("cpu"))
    outputs = []
    for value in flat:
        if isinstance(value, torch.Tensor):
            if not all(isinstance(size, int) for size in value.shape):
                raise coded_error(RuntimeError, "leaf.returns-data-dependent-shape")
            differentiable = value.requires_grad or (is_given and value.is_floating_point())
            outputs.append(Metadata(tuple(value.shape), value.dtype, device, differentiable))
        elif not is_plain(value):
            raise coded_error(TypeError, "leaf.returns-unsupported-type", type=type(value).__name__)
        elif reads_data and isinstance(value, Number) and not isinstance(value, Enum):
            raise coded_error(TypeError, "leaf.returns-data-dependent-number")
    if not outputs:
        raise coded_error(TypeError, "leaf.returns-no-tensor")
    leaf.outputs = tuple(outputs)
    leaf.results = Nested(tuple(TENSOR if isinstance(v, torch.Tensor) else v for v in flat), spec)


def _identities(container: Any) -> list[Any]:
    pairs = container.items() if isinstance(container, dict) else ((each, None) for each in container)
    return [(id(key) if not isinstance(key, (str, int)) else key, id(value)) for key, value in pairs]


_MISSING = object()


def _empty(metadata: Metadata) -> torch.Tensor:
    return torch.empty(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _random(metadata: Metadata, numbers: torch.Generator) -> torch.Tensor:
    shape, dtype = metadata.shape, metadata.dtype
    device = _real_device(metadata.device)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=numbers, dtype=torch.float32).mul_(0.1).to(device, dtype)
    return (torch.ones if dtype is torch.bool else torch.zeros)(shape, dtype=dtype, device=device)


def _real_device(device: torch.device) -> torch.device:
    """Return where to run instead of a device that this machine does not have, as in a plan."""
    return device if device.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")


def _real_copy(tensor: torch.Tensor) -> torch.Tensor:
    device = _real_device(tensor.device)
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone().to(device)


@contextlib.contextmanager
def _unchanged(leaf: Leaf, copy: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Note changes of the attributes of a leaf's modules in this context, and undo them at its end.

    This includes changes of lists, dictionaries and sets in attributes. Buffers and other tensors are copies meanwhile.
    """
    paths, modules = [], list[torch.nn.Module]()
    for root in leaf.modules:
        for path, module in root.named_modules():
            paths.append(path)
            modules.append(module)
    attributes = [dict(vars(m)) for m in modules]
    containers = [
        (value, value.copy())
        for each in attributes
        for value in each.values()
        if type(value) in (list, dict, OrderedDict, set)  # ordered ones hold hooks
    ]
    copies: dict[int, torch.Tensor] = {}
    for m in modules:
        for members in (m._buffers, vars(m)):
            for name, tensor in list(members.items()):
                if isinstance(tensor, torch.Tensor):
                    if id(tensor) not in copies:
                        copies[id(tensor)] = copy(tensor)
                    members[name] = copies[id(tensor)]
    present = [{**vars(m), **m._buffers} for m in modules]
    try:
        yield
        changed = {id(value) for value, before in containers if _identities(value) != _identities(before)}
        leaf.writes = frozenset(
            (path, name)
            for path, m, before in zip(paths, modules, present, strict=True)
            for name, value in {**vars(m), **m._buffers}.items()
            if before.get(name, _MISSING) is not value or (id(value) in changed and name not in OF_MODULES)
        )
    finally:
        for m, before in zip(modules, attributes, strict=True):
            vars(m).clear()
            vars(m).update(before)
        for value, before in containers:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
