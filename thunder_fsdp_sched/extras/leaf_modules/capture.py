"""Trace a call of a leaf module as a single operator, and refuse state that it shares with traced code.

A leaf reads and writes attributes of modules when it runs. A trace reads them at its start, and its epilogue writes them at
its end. So traced code would read the value that a leaf has written in the previous call, and a leaf that of traced code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    unwrap,
    wrap,
    wrap_const,
)
from thunder.core.jit_ext import EXT_FLAG_IS_MODULE, get_jit_ctx
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from torch.utils._pytree import tree_flatten, tree_map

from ...capture.leaves import Leaves
from ...capture.module_members import OF_MODULES
from ...capture.paths import ATTRIBUTE, FUNCTION, Path, Paths
from ...capture.refusals import refusal
from ...capture.torch_functions import may_require_grad
from ...errors import coded_error
from ...ir.inspection import nested
from ...ir.value_keys import key_of
from ...private_assignments import modified_members
from ...private_interpreter import call_recording
from ...runtime.traced_inputs import value_at
from .leaf import TENSOR, Leaf, Metadata, NamedParameter, Nested
from .observe import LeafError, is_plain, memory_of, observe, run_once, state_of
from .symbols import call


def call_leaf(leaves: Leaves, module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Trace a call of a leaf module, with wrapped values; return the wrapped result, or a signal."""
    for value in (*args, *kwargs.values()):
        proxy_contents(value)

    plain, context = unwrap(module), get_jit_ctx()
    if (error := error_of_leaf_read(leaves, plain)) is not None:
        return do_raise(error)

    def record(*args: Any, **kwargs: Any) -> Any:
        # Otherwise the interpreter would make another proxy of a tied parameter.
        kept = vars(context).setdefault("_fsdp_wrapped", [])
        wrapped = [_wrap_parameter(module, *each) for each in _parameters_of(plain)[1].items()]
        kept.extend(wrapped)
        return record_call(leaves, leaves[plain], plain, args, kwargs, [each.value for each in wrapped])

    return call_recording(record, *args, **kwargs)


def explain_change(leaves: Leaves, changed: Path) -> Any:
    """Note the module whose forward has changed its list or dictionary as a leaf; return the signal to trace again.

    Return ``None`` if that is the outermost module: then the check of the new traces says what is wrong.
    """
    roots = {FUNCTION: leaves.model}
    found = [value_at(roots, changed[:length]) for length in range(2, len(changed))] if changed[0] == FUNCTION else []
    modules = [value for value in found if isinstance(value, torch.nn.Module)]
    if not modules:
        return None
    error = coded_error(
        NotImplementedError,
        "module.changes-container-in-forward",
        container=type(value_at(roots, changed)).__name__,
        name=changed[-1][1],
    )
    leaves.obstacle = modules[-1], error
    return do_raise(error)


def note_obstacle(
    leaves: Leaves, error: BaseException, wrapped: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue
) -> None:
    """Note a module whose trace has failed, if it runs as it is, and no module within it does.

    An error that a run of the module itself also raises is the program's own, and must not be hidden.
    """
    module = unwrap(wrapped)
    if isinstance(error, StopIteration) or module is leaves.model or module in leaves:
        return
    if leaves.obstacle is not None and leaves.obstacle[1] is error:
        return
    leaves.obstacle = None
    path = next((path for path, part in leaves.model.named_modules() if part is module), "")
    if not path:
        return
    try:
        plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs))
        parameters = [_metadata(parameter) for parameter in _parameters_of(module)[1].values()]
        examples = examples_of(leaves, plain_args, plain_kwargs)
        leaf = _leaf_of(path, module, plain_args, plain_kwargs, parameters, examples)
        observe(leaf, None, examples)
        if not isinstance(error, NotImplementedError):  # perhaps the program's own, which a fake run may not raise
            run_once(leaf, examples)
    except LeafError as reason:
        getattr(error, "add_note", warnings.warn)(str(reason))  # Python 3.10 has no notes
        return
    except Exception:  # the module may run any code
        return
    leaves.obstacle = module, error


def proxy_contents(value: WrappedValue) -> None:
    """Let containers hold the proxies of their tensors. Thunder's ``recursively_proxy`` fails for dictionaries."""
    if isinstance(value.value, (tuple, list, dict)):
        value.track_items()
        items = value.item_wrappers.values() if isinstance(value.value, dict) else value.item_wrappers
        for item in items:
            proxy_contents(item)
        get_jit_ctx().proxify(value)


def record_call(
    leaves: Leaves,
    path: str,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: list[TensorProxy],
) -> Any:
    """Record a call of a leaf module or function in the trace; return its result, with proxies."""
    context = get_jit_ctx()
    examples = examples_of(leaves, args, kwargs)
    leaf = _leaf_of(path, function, args, kwargs, list(map(_metadata, parameters)), examples)
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, TensorProxy)]
    leaf = _known(leaves, leaf, examples)
    if not context.computation_trace.has_name(leaf.name):
        context.computation_trace.add_name(leaf.name)
    return leaf.results.fill(call(leaf, *tensors, *parameters))


def examples_of(leaves: Leaves, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """Return the values of those inputs of a leaf that are arguments of the model, by their numbers."""
    tensors = (value for value in tree_flatten((args, kwargs))[0] if _is_tensor(value))
    known = ((i, leaves.arguments.get(getattr(tensor, "name", ""))) for i, tensor in enumerate(tensors))
    found = {i: argument[1] for i, argument in known if argument is not None}
    return {i: value for i, value in found.items() if type(value) is torch.Tensor and not value.is_meta}


def _known(leaves: Leaves, leaf: Leaf, examples: Mapping[int, torch.Tensor]) -> Leaf:
    """Return the leaf of an earlier, equal call, or this one with observed outputs and a name."""
    is_training = [module.training for module in leaf.modules]
    modes = leaf.autocasts, is_training, torch.get_default_dtype()
    key = repr((leaf.arguments, leaf.inputs, leaf.parameters, modes))
    known = leaves.calls.setdefault(leaf.function, {})
    if key not in known:
        alike = next((other for other in _alike(leaves, leaf.function) if key in leaves.calls[other]), None)
        if alike is None:
            observe(leaf, leaves.output_like.get(leaf.path), examples)
        else:
            leaf.take_observations(leaves.calls[alike][key])
        leaf.give_name(leaves.names)
        leaf.traced_name = leaf.name
        known[key] = leaf
    for module in leaf.modules:
        leaves.written.update({(module.get_submodule(path), name): leaf.path for path, name in known[key].writes})
    return known[key]


def _alike(leaves: Leaves, function: Any) -> Iterator[torch.nn.Module]:
    """Yield leaf modules called before that differ from this one only in the values of parameters and buffers."""
    if isinstance(function, torch.nn.Module) and not leaves.output_like:
        state = _attributes_of(function)
        for other in leaves.calls:
            if type(other) is type(function) and other is not function and _attributes_of(other) == state:
                yield other


def _attributes_of(module: torch.nn.Module) -> Any:
    return [
        (path, type(part), part.training, key_of({k: v for k, v in vars(part).items() if k not in OF_MODULES}))
        for path, part in module.named_modules()
    ]


def _leaf_of(
    path: str,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    parameters: Sequence[Metadata],
    examples: Mapping[int, torch.Tensor],
) -> Leaf:
    """Return a new leaf for a call with proxies in place of tensors.

    Args:
        examples: see :func:`examples_of`.

    Raises:
        NotImplementedError, TypeError: a leaf cannot be called in this way.
    """
    what = f"the leaf {path!r} ({getattr(function, '__name__', type(function).__name__)})"
    if get_cache_option() is not CACHE_OPTIONS.CONSTANT_VALUES:
        raise coded_error(NotImplementedError, "leaf.needs-fixed-sizes", leaf=what)
    flat, spec = tree_flatten((args, kwargs))
    for value in flat:
        if not (_is_tensor(value) or is_plain(value)):
            raise coded_error(TypeError, "leaf.argument-of-other-type", leaf=what, got=type(value).__name__)
    tensors = [value for value in flat if _is_tensor(value)]
    inputs = list(map(_metadata, tensors))
    for number, tensor in enumerate(tensors):
        is_argument, is_function = number in examples, not isinstance(function, torch.nn.Module)
        if (is_argument and not examples[number].requires_grad) or (is_function and not may_require_grad(tensor)):
            inputs[number] = inputs[number]._replace(differentiable=False)
    arguments = Nested(tuple(TENSOR if _is_tensor(value) else value for value in flat), spec)
    autocasts = [
        (str(device), None if dtype is None else dtypes.to_torch_dtype(dtype), enabled)
        for device, dtype, enabled in get_compile_data().autocast_stack.stack
    ]
    entries = _parameters_of(function)[0] if isinstance(function, torch.nn.Module) else ()
    return Leaf(path, function, entries, inputs, parameters, arguments, autocasts)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (TensorProxy, torch.Tensor))


def _metadata(tensor: TensorProxy | torch.Tensor) -> Metadata:
    dtype = dtypes.to_torch_dtype(tensor.dtype)
    device = devices.to_torch_device(getattr(tensor, "_thunder_device", tensor.device))
    is_differentiable = dtype.is_floating_point or dtype.is_complex
    return Metadata(tuple(map(int, tensor.shape)), dtype, device, is_differentiable)


def _parameters_of(module: torch.nn.Module) -> tuple[list[NamedParameter], dict[tuple[str, ...], torch.nn.Parameter]]:
    """Return all names of parameters, and each distinct parameter with the path to its first name."""
    numbers: dict[int, int] = {}
    entries: list[NamedParameter] = []
    parameters: dict[tuple[str, ...], torch.nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in numbers:
                    numbers[id(parameter)] = len(parameters)
                    parameters[(*filter(None, path.split(".")), key)] = parameter
                entries.append(NamedParameter(owner, key, numbers[id(parameter)]))
    return entries, parameters


def _wrap_parameter(wrapped: WrappedValue, path: Sequence[str], value: Any) -> WrappedValue:
    """Return a parameter of a module as the interpreter wraps it when the program reads it."""
    provenance = wrapped.provenance
    for depth, key in enumerate(path):
        kind = "_parameters" if depth == len(path) - 1 else "_modules"
        members = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[provenance, wrap_const(kind).provenance])
        provenance = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[members, wrap_const(key).provenance])
        if kind == "_modules":
            provenance.ext_flag |= EXT_FLAG_IS_MODULE
    return wrap(value, provenance=provenance)


_MEMBER_DICTS = ("__dict__", "_buffers")


def error_of_leaf_read(leaves: Leaves, module: torch.nn.Module) -> NotImplementedError | None:
    """Return the error for a call of a leaf after traced code has changed one of its attributes or buffers."""
    parts = set(module.modules())
    for path in _changed():
        owner, name = _changed_object(path, leaves.model)
        if owner in parts:
            return refusal(
                f"forward changes {name!r} of the leaf module {leaves[module]!r} ({type(module).__name__}) before it calls "
                f"it. The trace would change it at its end, and the leaf would read the value of the call before",
                "Pass the value to the module as an argument, or assign it in the module itself",
            )
    return None


def error_of_traced_read(leaves: Leaves, source: WrappedValue, name: WrappedValue) -> NotImplementedError | None:
    """Return the error if traced code reads an attribute that a leaf has changed in this forward."""
    owner, key = unwrap(source), unwrap(name)
    path = leaves.written.get((owner, key)) if isinstance(owner, torch.nn.Module) else None
    if path is None:
        return None
    return refusal(
        f"forward reads {key!r}, which the leaf module {path!r} changes when it runs. The trace would read the value of "
        f"the call before",
        "Return it from the module",
    )


def error_of_shared_write(leaves: Leaves) -> NotImplementedError | None:
    """Return the error if traced code has written in place to a buffer that a leaf has returned."""
    for path in (path for path in _written() if path[0] == FUNCTION):
        buffer = value_at({FUNCTION: leaves.model}, path)
        for leaf in (leaf for calls in leaves.calls.values() for leaf in calls.values() if leaf.returned):
            if any(name in leaf.returned and memory_of(tensor) == memory_of(buffer) for name, tensor in state_of(leaf)):
                return refusal(
                    f"forward changes {path[-1][1]!r} of the leaf module {leaf.path!r}, which may have returned its memory",
                    "Return a clone of it from the module",
                )
    return None


def _changed() -> Iterator[Path]:
    """Yield the paths of the attributes and buffers that traced code has changed so far."""
    paths = Paths()
    for provenance, name in modified_members(get_jit_ctx()):
        if (path := paths.of(provenance)) is not None:
            yield (*path, (ATTRIBUTE, name))
    yield from _written()


def _written() -> Iterator[Path]:
    """Yield the paths of the tensors that traced code has written in place so far."""
    paths = Paths()
    for scope in get_jit_ctx().computation_trace.scopes:
        for bsym in nested(scope or ()):
            history = getattr(bsym.args[1], "history", None) if bsym.sym.id is PrimIDs.COPY_ else None
            if history is not None and (path := paths.of(history)) is not None:
                yield path


def _changed_object(path: Path, model: torch.nn.Module) -> tuple[Any, str]:
    """Return the object whose attribute or buffer is at ``path``, and the name; the path begins at the model."""
    *steps, (_, name) = path
    while steps[1:] and steps[-1][1] in _MEMBER_DICTS:
        steps.pop()
    try:
        return value_at({FUNCTION: model}, tuple(steps)), str(name)
    except Exception:  # the program has made it
        return None, str(name)
