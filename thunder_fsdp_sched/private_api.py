"""Private names of torch and Thunder, each used in one function only.

``docs/private_api.md`` lists them, with what to do when one disappears.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import thunder
import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.distributed import skip_data_parallel_grad_sync
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils import _foreach_utils


def all_gather_on_host(gathered: Any, own: Any, group: Any) -> Any:
    """Issue an all-gather of host memory and return its work.

    It is the backend's own method, which skips argument checks, logging and the dispatcher, and so takes less than half
    of the host time of ``dist.all_gather_into_tensor``.
    """
    issue = getattr(group._get_backend(torch.device("cpu")), "_allgather_base", None)
    if issue is None:
        return dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)
    return issue(gathered, own)


def all_gather_coalesced(outputs: list[Any], inputs: list[Any], group: Any) -> Any:
    """Issue one launch of an all-gather for each pair of tensors; return its work.

    It is the call at the end of ``_coalescing_manager``, without collecting and checking the arguments one by one.
    """
    options = AllgatherOptions()
    options.asyncOp = True
    # torch 2.13 renamed it.
    issue = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return issue(outputs, inputs, options)


def reduce_scatter_coalesced(outputs: list[Any], inputs: list[Any], op: Any, group: Any) -> Any:
    """Issue one launch of a reduce-scatter for each pair of tensors; return its work."""
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = True
    issue = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return issue(outputs, inputs, options)


def mesh_over(
    grid: Any, rank: int, group_names: list[str], device_type: str, dim_names: tuple[str, ...] | None
) -> DeviceMesh:
    """Return a device mesh over existing process groups, one per dimension, that finds them by name when asked.

    ``DeviceMesh.from_group`` would keep the groups alive.

    Args:
        grid: the global ranks, a list for each dimension.
        rank: this process's global rank.
    """
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=dim_names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = group_names  # type: ignore[assignment]
    return mesh


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


def register_foreach_type(tensor_class: type[torch.Tensor]) -> None:
    """Let torch's optimizers and functions of gradients use ``_foreach`` operators on tensors of this class.

    They look for it in lists, to which ``torch.distributed.tensor`` adds DTensor. Subclasses do not count.
    """
    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if tensor_class not in supported:
            supported.append(tensor_class)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the collectives of ``group``."""
    for device in ("cuda", "cpu"):
        found = getattr(_options_of(group, device), "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return c10d.default_pg_timeout


def copy_of_options(group: Any) -> Any:
    """Return a copy of the ``pg_options`` of ``group``, for another group with the same backend.

    It is ``None`` for backends without options, such as gloo. It is a copy because creating a group changes its
    options.
    """
    options = _options_of(group, "cuda")
    return copy.deepcopy(options) if hasattr(options, "is_high_priority_stream") else None


def _options_of(group: Any, device: str) -> Any:
    try:
        return group._get_backend(torch.device(device)).options
    except (AttributeError, RuntimeError):  # the group has no backend for the device, or the backend no options
        return None


def splits_default_group() -> bool:
    """Return whether ``new_group`` creates an NCCL group by splitting the default group's communicator.

    It does after ``init_process_group(device_id=...)``. All ranks of the default group must take part then, even with
    ``use_local_synchronization``.
    """
    default = c10d._get_default_group()
    return default.bound_device_id is not None and c10d._get_split_source(default) is not None


def state_name(name: str) -> str:
    """Return a parameter's name in a state dict: torch's wrappers for activation checkpointing remove their prefix."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

    return name.replace(_CHECKPOINT_PREFIX, "")


def is_group_name_taken(ranks: Collection[int], number: int, store: Store) -> bool:
    """Return whether the name that torch derives from ``ranks`` and ``number`` known groups has been used.

    Destroyed groups count, too: their members' addresses stay in ``store``, that of the default group, and a new group
    of the same name would try to connect to them.
    """
    text = "_".join(map(str, (*sorted(ranks), number)))
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    # The keys under which gloo and NCCL store the first member's address and the first communicator's id.
    return name in c10d._world.pg_names.values() or any(
        store.check([f"{name}//{key}"]) for key in ("cpu//0/0", "cuda//0")
    )


def process_groups() -> list[Any]:
    """Return the process groups that this process knows, in the order of creation."""
    return list(c10d._world.pg_names)


def refuse_foreign_functions(module: Any, names: Collection[str]) -> None:
    """Make functions of other libraries raise an error on a module that is sharded here.

    They are unaware of these shards, and would mistake each rank's rows for whole parameters. No function is replaced.
    Instead, the module gets attributes that only these functions read, before they access parameters:

    - ``DistributedDataParallel``, which would copy rank 0's rows to all ranks, reads the names of parameters to ignore.
    - Thunder's ``thunder.distributed.checkpoint`` reads ``use_fsdp`` of each module.

    Args:
        module: the original module.
        names: its sharded parameters.
    """
    module._ddp_params_and_buffers_to_ignore = _Refused(_BY_DDP)
    owners = {""}
    for name in names:
        path = name.rpartition(".")[0]
        while path:
            owners.add(path)
            path = path.rpartition(".")[0]
    for path, submodule in module.named_modules(remove_duplicate=False):
        if path in owners:
            submodule.use_fsdp = _Refused(_BY_CHECKPOINTS)


def set_in_call(module: Any, is_in_call: bool) -> None:
    """Let Thunder itself ask for ``use_fsdp`` of the original module, as it does in each call of the jitted one."""
    module.__dict__.pop("use_fsdp", None)
    if not is_in_call:
        module.use_fsdp = _Refused(_BY_CHECKPOINTS)
    elif isinstance(getattr(module, "use_fsdp", None), _Refused):  # PEFT's modules look it up in what they wrap
        module.use_fsdp = False


_BY_CHECKPOINTS = (
    "the module's parameters are sharded by thunder_fsdp_sched: this function would take the rows that this rank holds "
    "for whole parameters. Call thunder_fsdp_sched's full_state_dict, get_model_state_dict or get_optimizer_state_dict "
    "with the jitted module to save it, and load_checkpoint or the jitted module's load_original_state_dict to load it"
)
_BY_DDP = (
    "the module's parameters are sharded by thunder_fsdp_sched, which reduces their gradients: DistributedDataParallel "
    "would copy the rows of one rank to all others. Leave it out; for replicas of shards there is fsdp(mesh=...)"
)


class _Refused:
    """The value of an attribute that only functions of other libraries read. Reading it is an error."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __iter__(self) -> NoReturn:
        raise RuntimeError(self._message)

    def __bool__(self) -> NoReturn:
        raise RuntimeError(self._message)


def refuse_ddp() -> NoReturn:
    """Raise an error because a sharded module was passed to ``DistributedDataParallel``."""
    raise RuntimeError(_BY_DDP)


def parameters_of_running_ddp() -> list[Any]:
    """Return the parameters of the ``DistributedDataParallel`` whose forward is running."""
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return [] if running is None else running._module_parameters


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


def runs_under_torch_compile() -> bool:
    """Return whether ``torch.compile`` compiles the functions that this thread calls."""
    current = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return current is not None and current() not in (None, False)


def schema_of(op: Any) -> Any:
    """Return the schema of an operator overload of torch."""
    return op._schema


class TraceCache(list[Any]):
    """A list of Thunder's compiled traces of one module, with a callback when none fits a call, before Thunder traces.

    Thunder tries its entries in reversed order and stops at the first that fits.
    """

    def __init__(self, entries: Iterable[Any], on_miss: Callable[[], object]) -> None:
        super().__init__(entries)
        self._on_miss = on_miss

    def __reversed__(self) -> Iterator[Any]:
        yield from super().__reversed__()
        self._on_miss()


def watch_cache_misses(model: ThunderModule, on_miss: Callable[[], object]) -> Callable[[], object]:
    """Call ``on_miss`` before Thunder traces ``model`` for new inputs.

    Returns a function to call before each call of ``model``: ``on_miss`` if Thunder's cache option disables look-ups.

    Thunder notes the autocast context of each call in ``CompileData.autocast_stack``, and never removes it. Without
    correction all later compilations would be for autocast, so both functions remove what earlier calls have left.
    """
    stats = thunder.compile_stats(model)
    contexts = thunder.compile_data(model).autocast_stack.stack
    looks_up = thunder.cache_option(model) in (CACHE_OPTIONS.CONSTANT_VALUES, CACHE_OPTIONS.SYMBOLIC_VALUES)

    def before_trace() -> None:
        is_noted = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        while len(contexts) > is_noted:  # the last is that of this call
            contexts.popleft()
        on_miss()

    def before_call() -> None:
        contexts.clear()
        if not looks_up:
            on_miss()

    stats.interpreter_cache = TraceCache(stats.interpreter_cache, before_trace)
    return before_call


def quiet_no_sync(model: ThunderModule) -> None:
    """Give a jitted module a ``no_sync`` that only sets Thunder's flag, without a warning at its end.

    Thunder's method reduces the gradients of Thunder's own ddp and fsdp when it ends, and warns if neither was applied.
    Here the next backward reduces gradients. This object's attribute hides the method; the class stays as it is.
    """
    model.no_sync = skip_data_parallel_grad_sync


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
    hooks, accumulated_hooks = param._backward_hooks, param._post_accumulate_grad_hooks
    torch.utils.swap_tensors(param, new)
    if hooks:
        param._backward_hooks = None
        param._backward_hooks = hooks
    if accumulated_hooks:
        param._post_accumulate_grad_hooks = accumulated_hooks
