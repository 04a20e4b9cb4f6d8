"""Change whole parameters of a sharded model in place, or stream them out of it, to an inference engine for example.

[Note: Which rank's changes count]
Each rank has its own copy of the whole parameters and writes back its own rows of it. If ranks made different changes,
say by random numbers, the result would be rows of different matrices, which nobody would notice. So ranks either compare
digests of all whole parameters first, and raise an error if any differ, or receive all of them from one rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from thunder.core.module import ThunderModule
from torch import nn

from ...errors import coded_error
from ...private_torch import state_name
from ...runtime.bucket import Bucket
from ...sharding.former_parameters import retire
from ...sharding.sharded_module import ShardedModule, find_jitted
from ..initial_values import broadcast
from ..state_dicts.whole_buckets import gather_ahead
from .eager import in_former_place

_CHUNK = 1 << 24
"""Bytes that are copied to the host at once for a digest."""

_CHANGES = (
    "the changes inside of unsharded(...), so nothing was written back. Make the same changes on all ranks, with the same "
    "seed for example, or pass unsharded(from_rank=...)"
)


@contextlib.contextmanager
def unsharded(
    model: ThunderModule, *only: str | nn.Module, writeback: bool = True, from_rank: int | None = None
) -> Iterator[nn.Module]:
    """Make parameters whole, plain tensors inside a ``with`` block, and write back changes to them; a collective.

    It returns the original module of ``model``. Both have the whole parameters, in the dtype of the shards and on the
    device on which the model computes. It replaces FSDP1's ``summon_full_params`` and FSDP2's ``unshard`` and
    ``reshard``::

        with tfs.unsharded(model, "head") as module:
            torch.nn.init.orthogonal_(module.head.weight)

    It needs memory for all of these parameters, and for two buckets at the beginning. Gradients are disabled inside,
    and the model and its submodules cannot be called. ``module.state_dict()`` and ``module.load_state_dict(...)`` work
    on the whole parameters. Optimizer state and ``.grad`` belong to the shards and do not change. Optimizers that are
    created inside raise an error at their first step.

    All ranks must make the same changes, which is checked, unless ``from_rank`` names the rank whose changes count. If
    the block raises an exception on any rank, nothing is written on any rank. Buffers, and parameters that are not
    sharded, are always the model's own: changes to them take effect at once, on this rank alone.

    Cost, on any number of ranks: that of :func:`stream_full_parameters` for the buckets with these parameters, and a round.
    Writing back costs three exchanges, of digests and of the names of changed parameters; with ``from_rank`` two, and a
    broadcast of each parameter.

    Args:
        only: submodules, or names of submodules or parameters, to make whole; by default all. A tied parameter belongs to
            all modules that have it. The other parameters remain shards.
        writeback: whether to write changes back. If not, they are lost.
        from_rank: the global rank whose changes are sent to all ranks, for example because it alone has read a file.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: ``only`` contains something that is not in the model, or ``from_rank`` does not share all parameters.
        RuntimeError: inside another ``unsharded`` or an ``eager`` of the same model; at the end, a parameter was replaced
            or has another shape or dtype, or the shards were changed in the meantime (``optimizer.step()``).
        ScheduleDisagreement: ranks made different changes; the block failed on another rank; or ranks do something else.
    """
    jitted, sharded = find_jitted(model)
    if sharded.running_eagerly:
        raise coded_error(RuntimeError, "step.unsharded-inside-eager")
    sharded.check_ready()
    chosen = _choose(sharded, only)
    _check_source(sharded, chosen, from_rank)
    names = [b.spec.params[i].name for b, i in chosen if b.is_on_all_ranks]
    sharded.control.rendezvous("unsharded(...)", f"writeback={writeback}, from_rank={from_rank}", *names)
    whole = _gather(sharded, chosen)
    _install(jitted, sharded, whole, are_whole=True)
    all_or_none = sharded.control.all_or_none("whether unsharded(...) writes back; nothing was written")
    try:
        with all_or_none if writeback else contextlib.nullcontext():
            try:
                with torch.no_grad():
                    yield sharded.module
                if writeback and (fault := _find_fault(sharded, whole)):
                    raise coded_error(RuntimeError, "parameter.changes-cannot-be-written-back", fault=fault)
            finally:
                _install(jitted, sharded, whole, are_whole=False)
        if writeback:
            _write_back(sharded, whole, from_rank)
    finally:
        # Training a whole parameter after the block is an error: see [Note: Former parameters].
        sharded.former_params += [retire(one.param, one.name) for one in whole]


@dataclass(frozen=True, eq=False)
class _Whole:
    """A parameter that is whole in the block.

    Attributes:
        version: the version of the bucket's shard when it was gathered.
    """

    bucket: Bucket
    index: int
    param: nn.Parameter
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.bucket.spec.params[self.index].name

    @property
    def shard(self) -> nn.Parameter:
        return self.bucket.params[self.index]

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows of :attr:`param`."""
        rows = self.bucket.rows[self.index].of(self.param.detach())
        return rows.to(self.bucket.spec.shard_device)


def _install(jitted: ThunderModule, sharded: ShardedModule, whole: Sequence[_Whole], *, are_whole: bool) -> None:
    """Replace shards by whole parameters in both modules, or put the shards back."""
    sharded.module_params.replace_shards({id(one.shard): one.param for one in whole} if are_whole else {})
    for one in whole:
        names = one.bucket.spec.params[one.index].names
        jitted._overrides_parameters.update(dict.fromkeys(names, one.param if are_whole else one.shard))


def _find_fault(sharded: ShardedModule, whole: Sequence[_Whole]) -> str:
    """Return why these parameters cannot be written back; empty if they can."""
    if replaced := sharded.module_params.find_replaced():
        return (
            f"parameter {replaced!r} was replaced or removed; copy into it instead: "
            f"`with torch.no_grad(): p.copy_(new)`"
        )
    for one in whole:
        spec, param = one.bucket.spec.params[one.index], one.param
        if (tuple(param.shape), param.dtype, param.device) != (spec.shape, spec.dtype, one.bucket.spec.device):
            return (
                f"parameter {one.name!r} was given another shape, dtype or device: {param.dtype}"
                f"{list(param.shape)} on {param.device}, expected {spec}"
            )
        if one.bucket.version() != one.version:
            return (
                f"the shard of {one.name!r} was changed in the meantime, by an optimizer step for example, and writing "
                f"back would undo that; do it outside"
            )
    return ""


def _write_back(sharded: ShardedModule, whole: Sequence[_Whole], source: int | None) -> None:
    """Write this rank's rows of changed parameters; a collective. See [Note: Which rank's changes count]."""
    control = sharded.control
    with torch.no_grad():
        if source is not None and not control.is_single_rank:
            for one in whole:
                with control.doing(f"the broadcast of {one.name}"):
                    broadcast(one.param.detach(), source, one.bucket.ranks)
        elif not control.is_single_rank:
            digests = [(one.bucket.ranks.groups, f"{one.name}: digest {_digest(one.param)}") for one in whole]
            control.check_same_in_groups(_CHANGES, [(group, line) for groups, line in digests for group in groups])
        mine = [
            one.name for one in whole if not torch.equal(_bytes(one.local), _bytes(one.bucket.shard_views[one.index]))
        ]
        # A write counts as a change between forward and backward, so it is made on all ranks or on none.
        changed = set(itertools.chain(*control.exchange("the end of unsharded(...)", mine)))
        for one in whole:
            if one.name in changed:
                one.bucket.write_rows(one.index, one.local)
            if one.param.requires_grad is not one.shard.requires_grad:
                one.shard.requires_grad_(one.param.requires_grad)


def _choose(sharded: ShardedModule, only: Sequence[str | nn.Module]) -> list[tuple[Bucket, int]]:
    """Return the sharded parameters among those that the user has chosen, in the order of the plan."""
    if not only:
        return [(bucket, index) for bucket in sharded.buckets for index in range(len(bucket.params))]
    modules = dict(sharded.module.named_modules(remove_duplicate=False))
    params = dict(sharded.module.named_parameters(remove_duplicate=False))
    names: set[str] = set()
    for wanted in only:
        path = wanted if isinstance(wanted, str) else next((n for n, m in modules.items() if m is wanted), None)
        if path in params:
            names.add(path)
        elif path in modules:
            names.update(n for n in params if not path or n.startswith(f"{path}."))
        else:
            what = repr(wanted) if isinstance(wanted, str) else f"a {type(wanted).__name__}"
            raise coded_error(ValueError, "module.only-not-in-model", got=what)
    chosen = {sharded.locations[name] for name in names if name in sharded.locations}
    return [(b, i) for b in sharded.buckets for i in range(len(b.params)) if (b, i) in chosen]


def _check_source(sharded: ShardedModule, chosen: Sequence[tuple[Bucket, int]], source: int | None) -> None:
    if source is None:
        return
    if source not in sharded.world_group.global_ranks:
        raise coded_error(
            ValueError, "ranks.from-rank-outside-model", ranks=list(sharded.world_group.global_ranks), source=source
        )
    for bucket, index in chosen:
        if not bucket.is_on_all_ranks:
            raise coded_error(ValueError, "ranks.from-rank-lacks-common-parameter", name=bucket.spec.params[index].name)


def _gather(sharded: ShardedModule, chosen: Sequence[tuple[Bucket, int]]) -> list[_Whole]:
    indices: dict[Bucket, list[int]] = {}
    for bucket, index in chosen:
        indices.setdefault(bucket, []).append(index)
    found = []
    for bucket, tensors in gather_ahead(sharded, "unsharded(...)", [(b, b.spec.dtype) for b in indices]):
        version = bucket.version()
        for index in indices[bucket]:
            value = in_former_place(tensors[index], bucket.spec.params[index].strided)
            if value is tensors[index]:  # in a slot
                value = value.clone()
            shard = bucket.params[index]
            param = nn.Parameter(value, shard.requires_grad)
            param.__dict__.update(shard.__dict__)
            found.append(_Whole(bucket, index, param, version))
    return found


def _digest(value: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for chunk in _bytes(value.detach()).split(_CHUNK):
        digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # One element counts as contiguous whatever its stride, but not for `view`.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def stream_full_parameters(
    model: ThunderModule, dtype: torch.dtype | None = None, *, trainable_only: bool = False
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the name and the whole value of each parameter, on all ranks; a collective.

    Parameters are gathered bucket by bucket, the next bucket while the current one is consumed. Two unsharded buckets are
    in memory at a time; they use the memory of the training step if it suffices::

        for name, tensor in tfs.stream_full_parameters(model, dtype=torch.bfloat16):
            if dist.get_rank() == 0:
                dist.broadcast(tensor, src=0, group=group_with_engine)

    **A tensor is valid until the next one is asked for**: its memory is overwritten by later buckets, and afterwards by
    training. To keep it, copy it (``tensor.clone()``), and wait for an asynchronous send of it within the loop. Writes to
    it are lost.

    Names are those of ``model.state_dict()``, tied parameters appear once. Sharded parameters come first, in the
    order of the plan. Then come those that are not sharded (``ignored_params``), which may be this rank's own memory.
    Buffers are not included; every rank has them.

    Cost, on any number of ranks: one exchange, and a round of agreement and a gather for each bucket. A rank receives the
    model once.

    All ranks must run the loop to its end, or leave it within the same bucket. Otherwise their next collective call
    raises an error. Parameters must not change during the loop. The model may be called in it.

    Args:
        dtype: the dtype of floating-point tensors; the default is that of the parameters (not of ``mp_policy``). If it
            is smaller, each rank casts its rows before they are sent, which needs memory for two buckets' shards in
            that dtype.
        trainable_only: leave out parameters that do not require gradients, such as the base model of adapters.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``, or ``dtype`` is not a dtype.
        ValueError: ``dtype`` is not a floating-point dtype.
        RuntimeError: parameters were changed during the loop, or given other memory; a collective failed.
        ScheduleDisagreement: ranks asked for different things, or one left the loop earlier.
    """
    model, sharded = find_jitted(model)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise coded_error(TypeError, "parameter.stream-dtype-of-wrong-type", dtype=dtype)
    if dtype is not None and not dtype.is_floating_point:
        raise coded_error(ValueError, "parameter.stream-dtype-not-floating-point", dtype=dtype)
    sharded.check_ready()
    return _stream(model, sharded, dtype, trainable_only)


def _stream(
    model: ThunderModule, sharded: ShardedModule, dtype: torch.dtype | None, trainable_only: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    def is_wanted(param: torch.Tensor) -> bool:
        return param.requires_grad or not trainable_only

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    wanted: list[tuple[Bucket, torch.dtype]] = [
        (bucket, sent_dtype(bucket, dtype)) for bucket in sharded.buckets if any(map(is_wanted, bucket.params))
    ]
    for bucket, tensors in gather_ahead(sharded, f"stream_full_parameters(dtype={dtype})", wanted):
        for spec, param, tensor in zip(bucket.spec.params, bucket.params, tensors, strict=True):
            if is_wanted(param):
                yield state_name(spec.name), cast(tensor)
        del tensor, tensors
    for name, param in model.named_parameters():
        if name not in sharded.locations and is_wanted(param):
            yield state_name(name), cast(param.detach())


def sent_dtype(bucket: Bucket, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which to gather ``bucket`` so that values in ``dtype`` cost the fewest bytes.

    Args:
        dtype: the wanted dtype of floating-point parameters; ``None`` for that of the shards.
    """
    own = bucket.spec.dtype
    if dtype is None or not own.is_floating_point or dtype.itemsize > own.itemsize:
        return own
    try:
        bucket.transport.check(bucket.spec.device, (dtype,), bucket.ranks)
    except ValueError:
        return own  # the backend cannot send it
    is_divisible = bucket.spec.layout.unsharded_numel * dtype.itemsize % 4 == 0  # all_reduce adds 32-bit integers
    return dtype if is_divisible else own
