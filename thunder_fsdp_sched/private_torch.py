"""Private names of torch and Lightning Fabric, each used in one function only.

``docs/private_api.md`` lists them, with what to do when one disappears.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._guards import CompileId
from torch._logging._internal import trace_structured
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer
from torch.utils import _foreach_utils

NO_CONTEXT = nullcontext()
"""A context manager that does nothing."""


def labelled(what: str, subject: str = "") -> AbstractContextManager[Any]:
    """Return a context that labels its content in profiles, ``fsdp_what(subject)``.

    It does nothing without a profiler: a label costs 6 us.
    """
    if not _profiler_enabled():
        return NO_CONTEXT
    return torch.profiler.record_function(f"fsdp_{what.replace('-', '_')}" + (f"({subject})" if subject else ""))


def log_artifact(name: str, encoding: str, compile_id: tuple[int, int], payload: Callable[[], Any]) -> None:
    """Write ``payload()`` to torch's structured log, which ``TORCH_TRACE`` enables and tlparse shows.

    Args:
        encoding: ``"string"`` or ``"json"``.
        compile_id: two numbers; a compilation of torch.compile has those of its frame and of its recompilation.
        payload: called only if there is such a log.
    """
    trace_structured(
        "artifact",
        lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        compile_id=CompileId(frame_id=compile_id[0], frame_compile_id=compile_id[1]),
    )


def new_spec(mesh: DeviceMesh, placements: tuple[Any, ...], shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """Return DTensor's description of a tensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def dtensor_constructor() -> Callable[..., Any]:
    """Return the function that makes a DTensor over ``local`` itself: ``(class, local, spec, *, requires_grad)``.

    It takes a fraction of the host time of ``DTensor.from_local``.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.__new__


def dtensor_base() -> Any:
    """Return the class from which a DTensor that handles operators itself derives: DTensor, where torch allows it.

    torch 2.10 and 2.11 run DTensor's own operators on tensors of its subclasses, whatever their ``__torch_dispatch__``
    (pytorch/pytorch#177878). There, it is a tensor with the attributes of a DTensor that is no instance of DTensor.
    """
    from torch.distributed.tensor import DTensor

    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
        return DTensor

    class TensorLikeDTensor(torch.Tensor):
        __slots__ = ("_local_tensor", "_spec")
        __new__: Any = DTensor.__new__
        __torch_function__: Any = torch._C._disabled_torch_function_impl
        # With these two, conversions of modules swap parameters, as they swap DTensors, and assign no `data`.
        __tensor_flatten__ = DTensor.__tensor_flatten__
        __tensor_unflatten__ = staticmethod(DTensor.__tensor_unflatten__)
        device_mesh, placements, redistribute = DTensor.device_mesh, DTensor.placements, DTensor.redistribute

    return TensorLikeDTensor


def memory_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Return a key that is the same for tensors that share memory: the address of their storage.

    On the meta device all storages have the same address, so the key is that of the storage object.
    """
    storage = tensor.untyped_storage()
    is_meta = storage.device.type == "meta"  # those of fake tensors, too
    return tensor.device, storage._cdata if is_meta else storage.data_ptr()


def register_foreach_type(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's optimizers and functions of gradients use ``_foreach`` operators on tensors of this class.

    They look for it in lists, to which ``torch.distributed.tensor`` adds DTensor. Subclasses do not count.
    """
    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if tensor_class not in supported:
            supported.append(tensor_class)


def step_hooks(stepped: torch.optim.Optimizer) -> Iterator[Any]:
    """Return the hooks that run before and after a step of an optimizer, its own and those of all optimizers."""
    return itertools.chain(
        optimizer._global_optimizer_pre_hooks.values(),
        optimizer._global_optimizer_post_hooks.values(),
        stepped._optimizer_step_pre_hooks.values(),
        stepped._optimizer_step_post_hooks.values(),
    )


def default_reduce_dtype(own: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 of the installed torch reduces gradients if a policy has no ``reduce_dtype``.

    From torch 2.15 on it is that of the parameter's gradient, before that the one in which the module computes.

    Args:
        own: the parameter's dtype.
        computed: the dtype of the unsharded parameter.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return own if hasattr(FSDPParam, "unsharded_grad_dtype") else computed


def state_name(name: str) -> str:
    """Return a parameter's name in a state dict: torch's wrappers for activation checkpointing remove their prefix."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

    return name.replace(_CHECKPOINT_PREFIX, "")


def unwrap_fabric(wrapped: Any) -> Any:
    """Return what Lightning Fabric's wrapper of a module calls, or the optimizer that it wraps; anything else itself."""
    for package in ("lightning.fabric", "lightning_fabric"):
        wrappers = sys.modules.get(f"{package}.wrappers")
        if wrappers is None:  # nothing of this package can be wrapped
            continue
        if isinstance(wrapped, wrappers._FabricModule):
            return wrapped._forward_module
        if isinstance(wrapped, wrappers._FabricOptimizer):
            return wrapped.optimizer
    return wrapped


def control_fabric_sync(strategy: Any, control: Any) -> None:
    """Make ``fabric.no_backward_sync`` call ``control.no_backward_sync(module, enabled)``, for a strategy of Fabric."""
    strategy._backward_sync_control = control


def schema_of(op: Any) -> Any:
    """Return the schema of an operator overload of torch."""
    return op._schema


def replace_data(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Give ``param`` the memory, shape and device of ``data``. The object, its attributes and its hooks stay.

    It has its own version counter.
    """
    if param.is_meta == data.is_meta:
        # The node that accumulates its gradient has the old shape. A change of dtype makes autograd drop it.
        other = torch.float32 if param.dtype is torch.float64 else torch.float64
        if param.requires_grad:
            param.data = torch.empty(0, dtype=other, device=param.device)
        param.data = data
        return
    new = torch.nn.Parameter(data.data, param.requires_grad)
    new.__dict__.update(param.__dict__)
    hooks, accumulated_hooks = hooks_of(param)
    torch.utils.swap_tensors(param, new)
    param._backward_hooks = None
    set_hooks(param, hooks, accumulated_hooks)


_STATE = operator.attrgetter("dtype", "requires_grad")


def states_of(params: Iterable[torch.Tensor]) -> list[tuple[torch.dtype, bool]]:
    """Return the dtype of each parameter, and whether it requires a gradient.

    In a subclass of tensors, each attribute is first looked for in ``__torch_function__``, unless that is switched off.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_STATE, params))


def grads_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(operator.attrgetter("grad"), params))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[int, Any]]:
    """Return the hooks of these modules, and those of all modules, each with the number that torch gave it.

    Numbers are unique: no other registration of a hook gets the same one.
    """
    of_modules = itertools.chain.from_iterable(map(operator.attrgetter(*_HOOKS), modules))
    hooks = filter(None, itertools.chain(_global_hooks(), of_modules))
    return list(itertools.chain.from_iterable(map(operator.methodcaller("items"), hooks)))


def remove_other_hooks(modules: Iterable[torch.nn.Module], known: Collection[int]) -> None:
    """Remove the hooks of these modules whose numbers are not known: see :func:`find_hooks`."""
    for hooks in itertools.chain.from_iterable(map(operator.attrgetter(*_HOOKS), modules)):
        for number in hooks.keys() - known:
            del hooks[number]


def find_backward_hooks(module: torch.nn.Module) -> list[str | None]:
    """Return the names of the submodules with backward hooks, full or not; ``None`` among them for hooks of all modules."""
    found: list[str | None] = [None] if any(_global_hooks()[2:]) else []
    return found + [n for n, m in module.named_modules() if m._backward_hooks or m._backward_pre_hooks]


def has_old_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has hooks of ``register_backward_hook``, which a full one has replaced."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def _global_hooks() -> list[dict[int, Any]]:
    return [getattr(torch_modules, "_global" + name) for name in _HOOKS]


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether a call of ``module`` does more than call its ``forward``."""
    return module._compiled_call_impl is not None or bool(find_hooks([module]))


def running_node() -> Any:
    """Return the autograd node whose backward this thread runs, ``None`` outside of a backward."""
    return torch._C._current_autograd_node()


def backward_number() -> int:
    """Return the unique number of the backward that this thread runs; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the backward that this thread runs keeps its graph (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def run_backward(edges: tuple[Any, ...], gradients: tuple[torch.Tensor, ...], keep_graph: bool) -> None:
    """Run backward like ``torch.autograd.backward``, without its checks of shapes, which take longer than small graphs."""
    torch.autograd.graph._engine_run_backward(
        edges, gradients, keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether other tensors have the memory of this one."""
    return _owners(tensor) > _owners(torch.empty(0))


def _owners(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


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


def compiled_nodes_of(tensors: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of nodes that Thunder has created: the first of a backward, and the one that runs the compiled trace.

    Args:
        tensors: the outputs of one compiled forward, and any others.
    """
    for tensor in tensors:
        node = getattr(tensor, "grad_fn", None)
        if node is not None and node.name() == "ThunderOutputFunctionBackward":
            yield node, node.next_functions[0][0]
        if node is not None and node.name() == "ThunderFunctionBackward":  # thunderfx_disable_split_autograd
            yield node, node


def hooks_of(leaf: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of a leaf's tensor hooks and post-accumulate-grad hooks, from which handles remove hooks."""
    return leaf._backward_hooks or {}, leaf._post_accumulate_grad_hooks or {}


def set_hooks(leaf: Any, hooks: dict[int, Any], accumulated_hooks: dict[int, Any]) -> None:
    """Give a leaf dictionaries of tensor hooks and post-accumulate-grad hooks, unless they are empty."""
    if hooks:
        leaf._backward_hooks = hooks
    if accumulated_hooks:
        leaf._post_accumulate_grad_hooks = accumulated_hooks


READ_BY_DDP = "_ddp_params_and_buffers_to_ignore"
"""An attribute of a module with names of parameters, which ``DistributedDataParallel`` alone reads, before anything else."""


class _Refused(OrderedDict[Any, Any]):
    """A registry that ``fully_shard`` and ``replicate`` look into before they change a module."""

    def __init__(self, refuse: Callable[[str], object]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, function: object) -> bool:
        if (name := getattr(function, "__name__", "")) in ("fully_shard", "replicate"):
            self._refuse(name)
        return super().__contains__(function)

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # in copies of modules without parameters, which belong to no model


def refuse_composable(modules: Iterable[torch.nn.Module], refuse: Callable[[str], object]) -> None:
    """Call ``refuse`` with the name of ``fully_shard`` or ``replicate`` if it is applied to one of the modules."""
    for module in modules:
        vars(module)[STATE_KEY] = _Refused(refuse)


def compiled_function(function: Any) -> Callable[..., Any] | None:
    """Return the function from which ``torch.compile`` has made this one; ``None`` if it has not made it."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def is_under_functorch() -> bool:
    """Return whether a transform of ``torch.func`` runs the caller."""
    return torch._C._are_functorch_transforms_active()


def is_under_dynamo() -> bool:
    """Return whether the calling thread runs what ``torch.compile`` compiles."""
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())
