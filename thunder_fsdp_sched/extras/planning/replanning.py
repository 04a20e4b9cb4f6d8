"""Plan a traced step again for other options or another number of ranks, without tracing the model again.

[Note: Planning again]
Thunder's tracing, differentiation and claiming of operators take nearly all the time of a dry run. What they make, the
joint trace with one ``fsdp_unshard`` for each parameter, computes on unsharded values, so it depends neither on the
number of ranks nor on most options. Only the shards do: the arguments of the trace and the gradients that it returns. So
another plan shards a fresh module under the new options, puts its shards and buckets into that joint trace, and runs
everything that follows as a compilation does: this package's passes, the fusion executors, Thunder's split. The traces are
those that a dry run with these options would compile. Options that change a value of the computation (the dtype of
unsharded parameters, ``ignored_params``) need a trace of their own, and so do other inputs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import thunder
import torch
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used, transform_for_execution
from thunder.transforms.autodiff import split_into_forward_and_backward
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...compiled_traces import CompiledTraces
from ...errors import coded_error
from ...ir.effects import declared
from ...ir.inspection import snapshot
from ...options import Options
from ...runtime.bucket import Bucket
from ...transform import FSDPTransform
from ...transforms.shard_prologue import become_shard


class NeedsTrace(ValueError):
    """Options change what the model computes, so the model must be traced with them."""


def plan_again(
    traced: FSDPTransform, transform: FSDPTransform, jitted: ThunderModule, *, no_sync: bool = False
) -> CompiledTraces:
    """Return the traces of the step that ``traced`` has compiled last, as another transform plans it.

    It is called over the process group of ``transform``, and appends the result to ``transform.compiled``. See
    [Note: Planning again].

    Args:
        traced: a transform that has compiled a step.
        transform: another transform.
        jitted: an equal module, jitted with ``transform``.
        no_sync: plan it as a micro-batch under ``no_sync``.

    Raises:
        NeedsTrace: the options of ``transform`` change values of the computation.
        ValueError: a pass refuses these options.
    """
    before = traced.compiled[-1]
    call = before.call._replace(flags=[*before.call.flags, *["no_sync"] * no_sync])
    compilation = transform.begin_compilation(call, no_sync=no_sync)
    compilation.traces.parameters = before.parameters
    data, stats = thunder.compile_data(jitted), thunder.compile_stats(jitted)
    with compile_data_and_stats(data, stats):  # as in a compilation: Thunder reads options there
        joint = transform_for_execution(_with_shards(traced, transform), data.executors_list)
        forward, backward = (joint, None) if before.backward is None else split_into_forward_and_backward(joint)
        transform.transform_trace_post_optimization(del_last_used(forward))
        if backward is not None:
            transform.transform_trace_post_optimization(del_last_used(backward, clear_mutable_collections=True))
    return transform.compiled[-1]


def _with_shards(traced: FSDPTransform, transform: FSDPTransform) -> TraceCtx:
    """Return the joint trace of ``traced`` with the shards and buckets of ``transform``."""
    before = traced.compiled[-1]
    joint, locations, shards = before.differentiated, transform.sharded.locations, transform.sharded.shards
    assert joint is not None
    _refuse_other_values(traced, transform)
    swaps = {
        arg.name: _shard_of(arg, shards[name])
        for arg in joint.args
        if (name := before.parameters.get(arg.name)) in locations
    }
    new = snapshot(joint)
    new.bound_symbols = []
    for bsym in joint.bound_symbols:
        if (single := declared(bsym).single) is not None:
            assert single.param is not None
            name = single.bucket.spec.params[single.param].name
            if single.reduces:
                grad = swaps[bsym.output.name] = _shard_of(bsym.output, shards[name])
                grad._requires_grad = False
            bsym = bsym.from_bsym(args=(*locations[name], bsym.args[2]))
        proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
        swap_map = {variableify(p): swaps[p.name] for p in proxies if p.name in swaps}
        new.bound_symbols.append(bsym.from_bsym_swap_proxies(swap_map) if swap_map else bsym)
    new.args = [swaps.get(getattr(arg, "name", ""), arg) for arg in joint.args]
    return new


def _refuse_other_values(traced: FSDPTransform, transform: FSDPTransform) -> None:
    """Raise an error if options of ``transform`` change a value that the trace of ``traced`` computes."""
    old, new = _of_values(traced.options), _of_values(transform.options)
    for name, before in old.items():
        now = new[name]
        if isinstance(before, MixedPrecisionPolicy) and isinstance(now, MixedPrecisionPolicy):
            before = replace(before, reduce_dtype=now.reduce_dtype)
        if before != now:
            raise coded_error(NeedsTrace, "plan.replan-changes-computation", name=name, now=now, before=before)
    locations, new_locations = traced.sharded.locations, transform.sharded.locations
    if different := locations.keys() ^ new_locations.keys():
        raise coded_error(NeedsTrace, "plan.replan-with-other-parameters", names=", ".join(sorted(different)[:3]))
    for name, (bucket, index) in new_locations.items():
        before, now = _value(*locations[name]), _value(bucket, index)
        if before != now:
            raise coded_error(NeedsTrace, "plan.replan-with-changed-parameter", name=name, now=now, before=before)


def _of_values(options: Options) -> dict[str, Any]:
    """Return the options on which values of the trace depend."""
    init = options.init
    return {"mp_policy": options.mp_policy, "ignored_params": init.ignored_params, "device": init.device}


def _value(bucket: Bucket, index: int) -> str:
    """Return a description of an unsharded parameter."""
    return f"{bucket.spec.param_dtype} of shape {bucket.spec.params[index].shape} on {bucket.spec.device}"


def _shard_of(proxy: TensorProxy, shard: torch.nn.Parameter) -> TensorProxy:
    """Return a copy of the proxy of a shard, with the shape of another shard."""
    other = copy.copy(proxy)
    become_shard(other, shard)
    return other
