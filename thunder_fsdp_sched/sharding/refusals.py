"""Errors for modules, hooks, compilers and transforms that cannot be combined with sharding; they name the fix."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from thunder.core.module import ThunderModule
from thunder.core.trace import get_tracectx
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..capture.leaves import Leaves
from ..errors import coded_error
from ..extensions import load
from ..private_torch import (
    READ_BY_DDP,
    find_backward_hooks,
    has_old_backward_hooks,
    is_under_dynamo,
    is_under_functorch,
    memory_of,
    refuse_composable,
)
from ..runtime.memory import extent
from ..runtime.row_dtensor import RowDTensor
from .former_parameters import refuse_former
from .module_parameters import find_owner, tensors_in_containers

#
# Before sharding
#


def refuse_compiled(module: nn.Module) -> None:
    """Raise an error for a graph of ``thunder.fx``, whose parameters are its inputs: nothing would be sharded."""
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise coded_error(TypeError, "module.graph-of-thunder-fx")


def refuse_wrapped(module: nn.Module) -> None:
    """Raise an error for a module that another library has sharded, replicated or compiled, as a whole or in part.

    Raises:
        TypeError: names the submodule, and what to do.
    """
    for name, submodule in module.named_modules():
        where = f"submodule {name!r}" if name else "the module that was given to thunder.jit"
        if isinstance(submodule, FSDPModule):
            raise coded_error(TypeError, "module.sharded-by-fully-shard", module=where)
        if isinstance(submodule, (FullyShardedDataParallel, DistributedDataParallel, nn.DataParallel)):
            raise coded_error(
                TypeError, "module.wrapped-in-other-parallelism", module=where, wrapper=type(submodule).__name__
            )
    if is_compiled(module):
        raise coded_error(TypeError, "module.compiled-by-torch-compile")


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has compiled a module itself."""
    compiled: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, compiled) or module._compiled_call_impl is not None


def run_compiled_as_leaves(leaves: Leaves) -> None:
    """Let submodules that ``torch.compile`` has compiled be leaf modules.

    Raises:
        TypeError: one is not, because the user has chosen others.
    """
    parts = set(leaves.parts())
    for name, submodule in leaves.model.named_modules():
        if is_compiled(submodule) and submodule not in parts:
            if not leaves.automatic:
                raise coded_error(TypeError, "module.submodule-compiled-by-torch-compile", name=name)
            leaves[submodule] = name
            parts.update(submodule.modules())


def refuse_renamed(module: nn.Module) -> None:
    """Raise an error if ``named_parameters`` gives names under which the module has no parameters."""
    for name, _ in module.named_parameters():
        if find_owner(module, name) is None:
            raise coded_error(
                ValueError, "module.parameters-renamed-by-wrapper", wrapper=type(module).__name__, parameter=name
            )


def refuse_shards_and_grads(named: dict[str, nn.Parameter]) -> None:
    """Raise an error for parameters that are already shards, or that have an unsharded gradient."""
    refuse_former(named.values())
    for name, param in named.items():
        if isinstance(param, RowDTensor):
            raise coded_error(ValueError, "parameter.already-a-shard", name=name, owner=param.rows.label)
        if param.grad is not None:
            raise coded_error(ValueError, "parameter.gradient-before-sharding", name=name)


def refuse_grad_dtypes(named: dict[str, nn.Parameter]) -> None:
    """Raise an error for parameters whose ``grad_dtype`` is not their own dtype."""
    for name, param in named.items():
        if (dtype := getattr(param, "grad_dtype", param.dtype)) != param.dtype:
            raise coded_error(ValueError, "parameter.grad-dtype-set", name=name, grad_dtype=dtype, dtype=param.dtype)


def refuse_overlaps(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise an error for parameters of one storage that share bytes, because their shards would drift apart.

    They may lie side by side, as the weights of an LSTM do for cuDNN.
    """
    spans = sorted((*_span_of(param), at) for at, (_, param) in enumerate(params))
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            (first, first_param), (second, second_param) = params[min(one, other)], params[max(one, other)]
            raise coded_error(
                ValueError,
                "parameter.objects-share-memory",
                first=first,
                first_dtype=first_param.dtype,
                second=second,
                second_dtype=second_param.dtype,
            )


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the first element begins and the last one ends, in bytes from the start of the storage."""
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + extent(tensor.shape, tensor.stride())) * tensor.itemsize


def refuse_views(
    model: ThunderModule, named: dict[str, nn.Parameter], ignored: set[str], device: torch.device | None
) -> None:
    """Raise an error for tensors that share memory with a parameter, because sharding moves the parameter away."""
    # By storage, not by bytes: the audit of the first call sees aliases as storages.
    leaves = {
        memory_of(p): n for n, p in named.items() if p.numel() and (n not in ignored or device not in (None, p.device))
    }
    module_param_ids = {id(param) for param in model._model.parameters()}
    others = [
        *(("ignored parameter", n, named[n]) for n in ignored),
        *(("buffer", n, b) for n, b in model.named_buffers(remove_duplicate=False)),
        # Parameters may be in lists, which get the sharded ones.
        *(("attribute", n, t) for n, t in tensors_in_containers(model._model) if id(t) not in module_param_ids),
    ]
    for kind, name, tensor in others:
        shared = leaves.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        if shared is not None and tensor is not named[shared]:
            raise coded_error(
                ValueError, "parameter.memory-shared-with-other-tensor", role=kind, name=name, parameter=shared
            )


#
# After sharding
#


def explain_foreign_use(model: ThunderModule) -> None:
    """Let methods and wrappers of other libraries raise an error that says what to do with ``model`` instead."""
    methods = (name for name in vars(FSDPModule) if not name.startswith("_"))
    for name in (*methods, "register_comm_hook", "summon_full_params"):
        if not hasattr(model._model, name):
            vars(model)[name] = partial(_refuse_method, name)
    vars(model)[READ_BY_DDP] = _RefusedByDDP()
    refuse_composable(model.modules(), _refuse_composable)


def _refuse_method(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise coded_error(
        AttributeError, "module.foreign-method-called", name=name, fix=load("extras.foreign_names:fix_of")(name)
    )


class _RefusedByDDP:
    """An attribute of a module that only ``DistributedDataParallel`` reads."""

    def __iter__(self) -> Iterator[str]:
        raise coded_error(TypeError, "module.sharded-module-in-ddp")


def _refuse_composable(function: str) -> NoReturn:
    raise coded_error(TypeError, "module.other-sharding-after-fsdp", function=function)


def refuse_compilation(what: str, fix: str) -> None:
    """Raise an error if ``torch.compile`` runs the caller.

    Raises:
        RuntimeError: names ``what``, and the fix.
    """
    if is_under_dynamo():
        raise coded_error(RuntimeError, "module.called-under-torch-compile", what=what, fix=fix)


def refuse_function_transforms() -> None:
    """Raise an error if a transform of ``torch.func`` calls the model.

    Raises:
        RuntimeError: says what to do instead.
    """
    if is_under_functorch():
        raise coded_error(RuntimeError, "module.called-under-torch-func")


def refuse_nested() -> None:
    """Raise an error if Thunder traces the caller.

    Raises:
        TypeError: says what to jit.
    """
    if get_tracectx() is not None:
        raise coded_error(TypeError, "module.jitted-module-inside-jit")


#
# Before a call or before tracing
#


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture.

    Raises:
        ValueError: names the transform.
    """
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise coded_error(ValueError, "trace.cuda-graphs-of-collectives", transform=type(transform).__name__)


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise an error if a module that Thunder is about to trace has backward hooks, which Thunder ignores.

    A call with other hooks than the traced ones is traced again, so hooks that are added later are refused, too.

    Raises:
        NotImplementedError: names the module.
    """
    for name in find_backward_hooks(module):
        if name is None:
            owner = "all modules (torch.nn.modules.module.register_module_full_backward_hook)"
        else:
            owner = f"submodule {name!r}" if name else "the module that was given to thunder.jit"
        raise coded_error(NotImplementedError, "module.backward-hooks-do-not-run", owner=owner)


def refuse_old_backward_hooks(model: nn.Module) -> None:
    """Raise an error if the jitted module has a hook of ``register_backward_hook``, which sees other values than in eager.

    Raises:
        NotImplementedError: says what to call instead.
    """
    if has_old_backward_hooks(model):
        raise coded_error(NotImplementedError, "module.non-full-backward-hook")
