"""Stream whole parameters out of a sharded model, to an inference engine for example: bucket by bucket, one ahead.

See [Note: Gathering ahead] in ``extras.state_dicts.whole_buckets``.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...private_torch import state_name
from ...runtime.bucket import Bucket
from ...sharding.sharded_module import ShardedModule, find_jitted
from ..state_dicts.whole_buckets import gather_ahead


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

    All ranks must run the loop to its end, or leave it within the same bucket. Otherwise the next thing that they do
    together raises an error. Parameters must not change during the loop. The model may be called in it.

    Args:
        dtype: the dtype of floating-point tensors; the default is that of the parameters (not of ``mp_policy``). If it is
            smaller, each rank casts its rows before they are sent. That needs memory for two buckets' shards in it.
        trainable_only: leave out parameters that do not require gradients, such as the base model of adapters.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``, or ``dtype`` is no dtype.
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
