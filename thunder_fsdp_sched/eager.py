"""Evaluation and generation without compiling: the user's own module, gathered one bucket at a time.

[Note: Eager runs]
A trace fits one set of input shapes, so a sequence that grows by a token would be compiled at every step. Without
gradients there is little to plan: a bucket is gathered right before the innermost module that all its parameters are
reached through, and freed right behind it, by hooks. Two decisions differ from what a trace does.
*Memory of its own.* Each gather allocates, where a trace has slots. What a module returns may be a view of a parameter
(a positional embedding cut to length); it keeps the memory alive, where the next bucket would overwrite a slot. A trace
knows every reader; hooks do not.
*No prefetch.* Hooks do not know what is called next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch import nn

from .buffers import Arena, Bucket, InFlight, slot_bytes
from .groups import Group
from .precision import attach_casts
from .sharding import ShardedModule
from .symbols import all_gather, wait_params
from .transform import find_transform

__all__ = ["eager"]


@contextlib.contextmanager
def eager(model: ThunderModule, *, reshard_after_forward: bool = True) -> Iterator[nn.Module]:
    """Gives the module that ``model`` was made of, to be called uncompiled, with inputs of any shape, without gradients.

    Parameters are whole while the module is called that they belong to, and are freed behind it, so that one bucket (a
    block) is unsharded at a time. A bucket whose parameters no module below the root has for itself, as with an embedding
    that is the head's weight too, stays unsharded until the end. Dtypes are those of the compiled model. Values are read
    from the shards at each gather, and buffers are the model's own: running statistics are updated. A parameter that is
    written to is not. Other transforms of the model have no effect here.

    All ranks call the module the same number of times: one whose sequences have ended goes on with the others. That is
    compared before each gather and at the end. Call modules, not their ``forward``; a parameter that is used by another
    module than its own is on the meta device then, unless both are in one block.

    Args:
        model: what ``thunder.jit(module, transforms=[fsdp(...)])`` gave.
        reshard_after_forward: if false, all parameters are gathered at once and stay unsharded until the end. That takes
            the memory of the whole model and no communication: each rank calls what it likes, as often as it likes.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        RuntimeError: inside of another ``eager`` of the same model; ``model`` itself was called inside, or the module with
            gradients; a collective failed.
        ScheduleDisagreement: ranks gather other buckets, or not as often.
    """
    sharded, module = find_transform(model).sharded, model._model
    if sharded.running_eagerly:
        raise RuntimeError("eager: already inside eager(...) of this model; use the module that it gave")
    sharded.own.check()
    sharded.own.check_shards()
    sharded.check_initialized()
    if found := sharded.own.in_containers():
        path, name = next(iter(found.items()))
        raise RuntimeError(
            f"eager: {path} of the module holds parameter {name!r} beside its name: forward could read this rank's rows "
            f"there. Remove it"
        )
    unsharded = [_Unsharded(model, bucket, sharded.own.placeholders) for bucket in sharded.buckets]
    inside: dict[nn.Module, list[_Unsharded]] = {}
    for one in unsharded:
        inside.setdefault(one.innermost if reshard_after_forward else module, []).append(one)
    stay = inside.pop(module, [])
    with torch.no_grad(), contextlib.ExitStack() as undo:
        sharded.running_eagerly = True
        undo.callback(setattr, sharded, "running_eagerly", False)
        sharded.own.show_whole()
        undo.callback(sharded.own.show_shards)
        _use_current(model, sharded, undo)
        undo.callback(_reshard, unsharded, finally_=True)
        _unshard(stay)
        hooks = attach_casts(module, find_transform(model).options.mp_policy)
        hooks.append(model.register_forward_pre_hook(_refuse_compiled, prepend=True))
        hooks.append(module.register_forward_pre_hook(_refuse_gradients, prepend=True))
        for innermost, members in inside.items():
            hooks.append(innermost.register_forward_pre_hook(partial(_unshard, members), prepend=True))
            hooks.append(innermost.register_forward_hook(partial(_reshard, members), always_call=True))
        for hook in hooks:
            undo.callback(hook.remove)
        yield module
    sharded.control.meet("the end of eager(...)")
    _check_gathers(sharded, [one for one in unsharded if not sharded.control.concerns_all(one.bucket)])


class _Unsharded:
    """A bucket's parameters in the module: whole while somebody uses them, on the meta device otherwise.

    Attributes:
        innermost: the innermost module that is called whenever one of the parameters is used.
        users: calls of it that go on: a block may call itself.
        gathers: how often the bucket was gathered.
    """

    def __init__(self, model: ThunderModule, bucket: Bucket, placeholders: Mapping[str, nn.Parameter]) -> None:
        self.model, self.bucket = model, bucket
        self.users = self.gathers = 0
        names = [(name, index) for index, param in enumerate(bucket.spec.params) for name in param.names]
        ways = []
        self.places: list[tuple[dict[str, nn.Parameter | None], str, int, nn.Parameter]] = []
        for name, index in names:
            *path, leaf = name.split(".")
            way = [model._model]
            for child in path:
                way.append(way[-1]._modules.get(child, way[-1]))
            own = way[-1]._parameters
            if own.get(leaf) is None:
                raise RuntimeError(f"eager: the module has no parameter {name!r}: another transform has made it")
            ways.append(way)
            self.places.append((own, leaf, index, placeholders[name]))
        self.innermost = _innermost(ways)

    def issue(self) -> InFlight:
        bucket, spec = self.bucket, self.bucket.spec
        self.gathers += 1
        bucket.tally.expected += 2
        slot = Arena(spec.device).slot(0, slot_bytes(spec, spec.param_dtype))
        return all_gather(bucket, slot, *(self.model.get_parameter(param.name) for param in spec.params))

    def fill(self, flight: InFlight) -> None:
        assert flight.slot is not None
        params = [
            nn.Parameter(whole, param.requires_grad)
            for whole, param in zip(wait_params(self.bucket, flight), self.bucket.spec.params, strict=True)
        ]
        self.bucket.source.finish_copy()
        flight.slot.arena.let_go()
        for own, leaf, index, _ in self.places:
            own[leaf] = params[index]

    def free(self) -> None:
        for own, leaf, _, placeholder in self.places:
            own[leaf] = placeholder


def _innermost(ways: Sequence[Sequence[nn.Module]]) -> nn.Module:
    """The innermost module that is on all ways from the root to parameters, and that is called to use them.

    By identity, so that a block which stands in two places is one.
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
    wanted = [one for one in members if not one.users]
    for one in members:
        one.users += 1  # before anything that may fail: the hook behind the call runs in any case
    _refuse_gradients()
    control = wanted[0].bucket.control if wanted else None
    if control is not None:
        names = [one.bucket.spec.name for one in wanted if control.concerns_all(one.bucket)]
        if names:
            control.meet("gathering inside eager(...)", *names)
    flights = [one.issue() for one in wanted]
    for one, flight in zip(wanted, flights, strict=True):
        one.fill(flight)


def _reshard(members: Sequence[_Unsharded], *_: Any, finally_: bool = False) -> None:
    for one in members:
        one.users = 0 if finally_ else max(one.users - 1, 0)
        if not one.users:
            one.free()


def _use_current(model: ThunderModule, sharded: ShardedModule, undo: contextlib.ExitStack) -> None:
    """Gives the module what the jitted model has instead of its own: buffers, and parameters that are not sharded."""
    module = model._model
    for kind, named, current in (
        ("_parameters", module.named_parameters(remove_duplicate=False), model.get_parameter),
        ("_buffers", module.named_buffers(remove_duplicate=False), model.get_buffer),
    ):
        tied: dict[int, torch.Tensor] = {}  # the model knows them by their first name alone
        for name, own in list(named):
            if name not in sharded.places:
                path, _, leaf = name.rpartition(".")
                owner = getattr(module.get_submodule(path), kind)
                owner[leaf] = given = tied.setdefault(id(own), current(name))
                undo.callback(_put_back, model, owner, leaf, name, own, given)


def _put_back(
    model: ThunderModule, owner: dict[str, Any], leaf: str, name: str, own: torch.Tensor, given: torch.Tensor
) -> None:
    now = owner.get(leaf)
    if now is not None and now is not given and not isinstance(now, nn.Parameter):
        model.set_buffer(name, now)  # a forward has put another buffer into its place: a cache, a counter
    owner[leaf] = own


def _refuse_compiled(*_: Any) -> None:
    raise RuntimeError("the compiled model was called inside eager(...) of it: call the module that eager(...) gave")


def _refuse_gradients(*_: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("a module inside eager(...) was called with gradients enabled; they need the compiled model")


def _check_gathers(sharded: ShardedModule, unsharded: Sequence[_Unsharded]) -> None:
    """Compares through the store: another collective of the same size would take a gather that others still wait for."""
    groups: dict[str, Group] = {one.bucket.ranks.group.name: one.bucket.ranks.group for one in unsharded}
    for name, group in groups.items():
        lines = [
            f"bucket {one.bucket.spec.name!r} was gathered {one.gathers} times"
            for one in unsharded
            if one.bucket.ranks.group.name == name
        ]
        sharded.agreement.about("eager", group).check_same(
            "what was called inside eager(...)", lines, at="the end of eager(...)"
        )
