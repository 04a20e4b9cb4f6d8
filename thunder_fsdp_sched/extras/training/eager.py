"""Evaluate and generate without compiling: call the user's own module, gathering one bucket at a time.

[Note: Eager runs]
A trace fits one set of input shapes, so a sequence that grows by one token would be compiled at every step. Without
gradients there is little to plan: hooks gather a bucket right before the innermost module that contains all its
parameters, and free it right after. Three decisions differ from a trace:

*No slots.* Each gather allocates new memory. An output of a module may be a view of a parameter (a positional embedding
cut to length), which keeps that memory alive; in a slot, the next bucket would overwrite it. A trace knows every
reader, hooks do not.

*Parameters have their former strides.* The operators of the module are not known here, so none can be refused that
depends on them (``as_strided``). A parameter that was not contiguous is copied after its gather.

*No prefetch.* Hooks do not know which module is called next.

A module may also use a parameter that it does not own: the head uses the weight of the embedding, for example. No hook
sees such a use, so a parameter that is not gathered is a :class:`LazyParameter`, which is gathered when an operator
reads it. No hook sees the last such use, either, so the bucket then stays unsharded until the end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch import nn
from torch.utils._pytree import tree_map_only

from ...errors import coded_error
from ...plan.specs import StridedView
from ...runtime.bucket import Bucket
from ...runtime.memory import InFlight, extent
from ...runtime.ops import all_gather, wait_params
from ...sharding.casts import attach_casts
from ...sharding.module_parameters import Entry
from ...sharding.refusals import is_compiled
from ...sharding.sharded_module import find_jitted


class LazyParameter(nn.Parameter):
    """A parameter without memory. An operator on it, or on ``detach()`` of it, computes with the result of ``read``.

    Torch's own meta tensors do not work here: on a CPU, ``F.linear`` and ``matmul`` accept one, and return
    uninitialized memory. Metadata, including the device, are those of the unsharded parameter.

    Args:
        like: a tensor with its shape, strides and dtype.
    """

    read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, requires_grad: bool, read: Callable[[], torch.Tensor]
    ) -> LazyParameter:
        lazy = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        lazy.read = read
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # also for `.data` and state_dict(): reads nothing yet
            return cls(args[0], args[0].device, False, args[0].read)
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.read(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # It gathers nothing, because a debugger runs on one rank.
        return f"LazyParameter({tuple(self.shape)}, {self.dtype}, {self.device})"


@contextlib.contextmanager
def eager(model: ThunderModule, *, reshard_after_forward: bool = True) -> Iterator[nn.Module]:
    """Return the original module of ``model``, to be called uncompiled, with inputs of any shape, without gradients.

    A module's parameters are unsharded while it runs and freed right after, so one bucket (a block) is unsharded at a
    time. A bucket whose parameters only the root module contains, such as an embedding that is also the head's weight,
    stays unsharded until the end. So does a bucket once a parameter of it is used while its module is not called, as in
    ``F.linear(x, self.embedding.weight)``. Dtypes are those of the compiled model. Each gather reads the current shards.
    Buffers are those of the model, so running statistics are updated; writes to a parameter are lost. Other transforms of
    the model have no effect here, and functions of ``torch.compile`` run uncompiled if the model has compiled submodules.

    All ranks must call the module the same number of times: a rank whose sequences have finished keeps calling until
    the slowest rank is done. This is checked before each gather and at the end.

    Cost, on any number of ranks: an exchange at the end, and for each call of a block a round of agreement and a gather of
    its bucket. So a rank receives the model once for each call of it.

    Args:
        model: the result of ``thunder.jit(module, transforms=[fsdp(...)])``.
        reshard_after_forward: if false, all parameters are gathered at the start and stay unsharded until the end. That
            needs memory for the whole model, but no further communication: each rank may call any module, any number of
            times.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        RuntimeError: the call is inside another ``eager`` of the same model; ``model`` itself was called inside, or the
            module was called, or a parameter used, with gradients enabled; a parameter is used after the end; a collective
            failed.
        ScheduleDisagreement: ranks gather different buckets, or a different number of times.
    """
    model, sharded = find_jitted(model)
    module = model._model
    if sharded.running_eagerly:
        raise coded_error(RuntimeError, "step.eager-inside-eager")
    sharded.check_ready()
    params = sharded.module_params
    if found := params.in_containers():
        path, name = next(iter(found.items()))
        raise coded_error(RuntimeError, "module.parameter-held-beside-name", path=path, name=name)
    unsharded = [_Unsharded(module, bucket, params.entries_of(bucket)) for bucket in sharded.buckets]
    inside: dict[nn.Module, list[_Unsharded]] = {}
    for one in unsharded:
        inside.setdefault(one.innermost if reshard_after_forward else module, []).append(one)
    stay = inside.pop(module, [])
    with torch.no_grad(), contextlib.ExitStack() as undo:
        if any(map(is_compiled, module.modules())):  # Dynamo would trace the hooks that gather
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        sharded.running_eagerly = True
        undo.callback(setattr, sharded, "running_eagerly", False)
        params.replace_shards(params.placeholders)
        undo.callback(params.replace_placeholders)
        undo.callback(params.objects.replaced)  # the jitted model has the buffers that forward replaces: a cache
        for one in unsharded:
            one.free()
            undo.callback(one.end)
        _unshard(stay)
        hooks = attach_casts(module, sharded.mp_policy)
        hooks.append(module.register_forward_pre_hook(_refuse_gradients, prepend=True))
        for innermost, members in inside.items():
            hooks.append(innermost.register_forward_pre_hook(partial(_unshard, members), prepend=True))
            hooks.append(innermost.register_forward_hook(partial(_reshard, members), always_call=True))
        for hook in hooks:
            undo.callback(hook.remove)
        yield module
    sharded.control.check_same_in_groups(
        "the gathers inside eager(...)",
        [
            (one.bucket.ranks.group, f"bucket {one.bucket.spec.name!r} was gathered {one.gathers} times")
            for one in unsharded
            if not one.bucket.is_on_all_ranks
        ],
    )


class _Unsharded:
    """The parameters of one bucket in the module: unsharded while in use, otherwise without memory.

    Attributes:
        innermost: the innermost module that is called whenever a parameter is used by its owner.
        users: number of running calls of it, plus one after a parameter has been used outside of them.
        gathers: number of gathers of the bucket so far.
    """

    def __init__(self, module: nn.Module, bucket: Bucket, entries: Sequence[Entry]) -> None:
        self.bucket, self.entries = bucket, entries
        self.users = self.gathers = 0
        self.has_ended = False
        self.params: list[nn.Parameter] = []
        self.lazy = {entry.index: self._lazy(entry) for entry in entries}
        names = {name for param in bucket.spec.params for name in param.names}
        if created := names - {entry.name for entry in entries}:
            raise coded_error(RuntimeError, "module.parameter-of-another-transform", name=min(created))
        self.innermost = _innermost([_modules_on_path(module, entry.name) for entry in entries])

    def issue(self) -> InFlight:
        bucket = self.bucket
        self.gathers += 1
        bucket.issue_counts.expected += 2
        return all_gather(bucket, bucket.temporary_slot(bucket.spec.param_dtype), *bucket.params)  # type: ignore[arg-type]

    def fill(self, flight: InFlight) -> None:
        assert flight.slot is not None
        self.params = [
            nn.Parameter(in_former_place(whole, param.strided), param.requires_grad)
            for whole, param in zip(wait_params(self.bucket, flight), self.bucket.spec.params, strict=True)
        ]
        self.bucket.source.finish_copy()
        flight.slot.arena.release()
        for entry in self.entries:
            entry.owner._parameters[entry.leaf] = self.params[entry.index]

    def free(self) -> None:
        self.params = []
        for entry in self.entries:
            entry.owner._parameters[entry.leaf] = self.lazy[entry.index]

    def end(self) -> None:
        self.has_ended = True
        self.free()

    def _lazy(self, entry: Entry) -> LazyParameter:
        spec, placeholder = self.bucket.spec, entry.placeholder
        whole = torch.empty(placeholder.shape, dtype=placeholder.dtype, device="meta")
        like = in_former_place(whole, spec.params[entry.index].strided)
        return LazyParameter(like, spec.device, placeholder.requires_grad, partial(self._read, entry))

    def _read(self, entry: Entry) -> torch.Tensor:
        """Return a parameter for an operator, which may run outside of all modules that gather it."""
        if self.has_ended:
            raise coded_error(RuntimeError, "step.parameter-used-after-eager", name=entry.name)
        _refuse_gradients()
        if not self.params:
            _unshard([self])
        return self.params[entry.index]


def in_former_place(whole: torch.Tensor, strided: StridedView | None) -> torch.Tensor:
    """Return an unsharded parameter with the strides and the storage offset that it had before sharding."""
    if strided is None or not whole.numel() or 0 in strided.strides:  # an expanded one has less memory than elements
        return whole
    length = strided.offset + extent(whole.shape, strided.strides)
    return whole.new_empty(length).as_strided(whole.shape, *strided).copy_(whole)


def _modules_on_path(module: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules from the root to the one that owns the parameter ``name``."""
    return list(itertools.accumulate(name.split(".")[:-1], nn.Module.get_submodule, initial=module))


def _innermost(ways: Sequence[Sequence[nn.Module]]) -> nn.Module:
    """Return the innermost module that is on all paths from the root to the parameters and is called to use them.

    Modules are compared by identity, so a block that is used in two positions is one module.
    """
    on_all = set.intersection(*(set(way) for way in ways))
    first = list(ways[0])
    for depth, module in enumerate(first):
        if isinstance(module, nn.MultiheadAttention):  # it reads the parameters of its children instead of calling them
            del first[depth + 1 :]
    return next(
        m for m in reversed(first) if m in on_all and (m is first[0] or type(m).forward is not nn.Module.forward)
    )


def _unshard(members: Sequence[_Unsharded], *_: Any) -> None:
    wanted = [one for one in members if not one.params]
    for one in members:
        one.users += 1  # increment first: the post-forward hook runs even if gathering fails
    _refuse_gradients()
    control = wanted[0].bucket.control if wanted else None
    if control is not None:
        names = [one.bucket.spec.name for one in wanted if one.bucket.is_on_all_ranks]
        if names:
            control.rendezvous("gathering inside eager(...)", *names)
    flights = [one.issue() for one in wanted]
    for one, flight in zip(wanted, flights, strict=True):
        one.fill(flight)


def _reshard(members: Sequence[_Unsharded], *_: Any) -> None:
    for one in members:
        one.users = max(one.users - 1, 0)
        if not one.users:
            one.free()


def _refuse_gradients(*_: Any) -> None:
    if torch.is_grad_enabled():
        raise coded_error(RuntimeError, "step.gradients-inside-eager")
