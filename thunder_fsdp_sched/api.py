"""The public entry points: :func:`fsdp`, and the plugin "fsdp-sched" of ``thunder.compile(model, plugins=[...])``."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar
from typing import ParamSpec as Arguments

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from thunder.plugins import register_plugin
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .errors import coded_error
from .extensions import load
from .ir.schedule import StepSchedule
from .option_checks import (
    check_accumulate,
    check_agree,
    check_bucketing,
    check_bytes,
    check_cluster,
    check_comm_policy,
    check_factor,
    check_gathers,
    check_hook,
    check_leaves,
    check_mp_policy,
    check_offload_policy,
    check_prefetch,
    check_schedule,
    check_transport,
    flag,
    is_a,
    or_by_module,
)
from .option_groups import Debug, Init, Ranks, Sharding
from .options import Options
from .plan.specs import Encoding, ParamSpec
from .transform import FSDPTransform

if TYPE_CHECKING:
    from .extras.planning.clusters import ClusterSpec

P = Arguments("P")
R = TypeVar("R")

_GROUPS = {"sharding_strategy": Sharding, "ranks": Ranks, "init": Init, "debug": Debug}

_FORMER = {
    **{
        each.name: f"{name}={kind.__name__}({each.name}=...)" for name, kind in _GROUPS.items() for each in fields(kind)
    },
    "reshard_after_forward": (
        'sharding_strategy="zero3" for True, "zero2" for False, and Sharding(secondary_ranks=8) for a number'
    ),
    "release": 'sharding_strategy=Sharding(release=True) for "step"',
    "allow_different_computation": "ranks_may_differ=True",
    "process_group": "ranks=process_group",
    "mesh": "ranks=mesh",
    "allow_different_initialization": "init=Init(allow_different_values=True)",
    "move_state_dict_to_cpu": "stream_full_parameters(model) or save_safetensors(model, path)",
    "auto_wrap_policy": "bucketing_strategy=..., by default a bucket for each block; no module is wrapped",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(...) of torch.distributed.fsdp",
    "cpu_offload": "offload_policy=CPUOffloadPolicy() of torch.distributed.fsdp",
    "device_id": "init=Init(device=...)",
    "device_mesh": "ranks=mesh",
    "sync_module_states": "init=Init(broadcast_from=0)",
    "ignored_modules": "init=Init(ignored_params=...), parameters or their names",
    "ignored_states": "init=Init(ignored_params=...), parameters or their names",
    "backward_prefetch": "prefetch=..., a number of buckets, for forward and backward",
    "forward_prefetch": "prefetch=..., a number of buckets, for forward and backward",
    "limit_all_gathers": "max_gathers_in_flight=..., a number",
    "shard_placement_fn": "left out: parameters are cut along dim 0",
    "dp_mesh_dims": "ranks=mesh['replicate', 'shard']",
    **dict.fromkeys(("use_orig_params", "gradient_as_bucket_view", "static_graph"), "left out: it is always so"),
    "find_unused_parameters": "left out, or ranks_may_differ=True if ranks use different parameters",
    "stage": 'sharding_strategy="zero2" or "zero3"',
    "overlap_comm": "left out: it is always so",
    **dict.fromkeys(
        ("bucket_cap_mb", "reduce_bucket_size", "allgather_bucket_size"), 'bucketing_strategy="25MB", for example'
    ),
    "gradient_accumulation_steps": "left out: run micro-batches in `with model.no_sync():`",
    "gradient_clipping": "left out: call clip_grad_norm_(model, max_norm)",
}
"""How fields of groups, and options of earlier releases, FSDP, DDP and DeepSpeed, are spelled as options."""


def _explains_misuse(function: Callable[P, R]) -> Callable[P, R]:
    """Let positional arguments and unknown options raise errors that say what to write instead."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if args and isinstance(args[0], torch.nn.Module):
            raise coded_error(TypeError, "option.model-passed-to-fsdp")
        if args:
            raise coded_error(TypeError, "option.positional-arguments", got=args[0])
        for name in options.keys() - names:
            if name in _FORMER:
                raise coded_error(TypeError, "option.renamed-option", name=name, now=_FORMER[name])
            close = "".join(f"; did you mean {known!r}?" for known in difflib.get_close_matches(name, names, n=1))
            raise coded_error(TypeError, "option.no-such-option", name=name, hint=close)
        return function(*args, **options)

    call.transform_module = _refuse_uncalled  # type: ignore[attr-defined]
    return call


def _refuse_uncalled(model: torch.nn.Module) -> NoReturn:
    raise coded_error(TypeError, "option.fsdp-not-called")


@_explains_misuse
def fsdp(
    *,
    sharding_strategy: str | FSDPType | Callable[[str, torch.nn.Module], str | FSDPType | None] | Sharding = "zero3",
    bucketing_strategy: str | FSDPBucketingStrategy | int | Callable[[str, torch.nn.Parameter], str] = "block",
    prefetch: int | Literal["auto"] | None = None,
    max_memory: int | str | None = None,
    accumulate: Literal["unsharded", "sharded"] | None = None,
    max_gathers_in_flight: int | None = None,
    cluster: ClusterSpec | str | None = None,
    schedule: str | Path | StepSchedule | None = None,
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = "auto",
    mp_policy: MixedPrecisionPolicy | Callable[[str, torch.nn.Module], MixedPrecisionPolicy | None] | None = None,
    comm_policy: Encoding | Callable[[str, torch.nn.Module], Encoding | None] | None = None,
    gradient_divide_factor: float | Callable[[str, torch.nn.Module], float | None] | None = None,
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None = None,
    offload_policy: OffloadPolicy | None = None,
    ranks: ProcessGroup | DeviceMesh | Ranks | None = None,
    init: Init = Init(),  # noqa: B008  # frozen
    leaf_modules: Literal["auto"]
    | Sequence[str | type | Callable[[str, torch.nn.Module], bool] | tuple[Any, Callable[..., Any]]] = "auto",
    agree: Literal["step", "compile", "never"] = "step",
    ranks_may_differ: bool = False,
    debug: Debug | None = None,
) -> FSDPTransform:
    """Return a transform that shards a module: ``thunder.jit(model, transforms=[fsdp(...)])``.

    ``thunder.jit`` shards the module at once. From then on its parameters are DTensors that hold this rank's rows, in one
    flat buffer per bucket. Create optimizers, and take parameters for hooks and groups, after that. Code that would mistake
    rows for whole parameters raises an error.

    On any number of ranks, a step costs at most two gathers and one reduction for each bucket, and two rounds of agreement
    (``agree``). A rank receives the unsharded parameters twice and sends their gradients once.

    Args:
        sharding_strategy: ``"zero3"`` frees unsharded parameters after their last use in forward and gathers them again
            in backward. This needs the least memory and 1.5 times the communication of ``"zero2"``. Buckets that are
            still resident when backward starts are not gathered again. ``"zero2"`` keeps all parameters unsharded until
            backward has used them. A callable ``(module name, module) -> strategy`` decides for each module and the
            parameters that it owns directly; ``None`` means as for the module that contains it (for the root
            ``"zero3"``). Parameters with different strategies are in different buckets. :class:`Sharding` takes one of
            these and more: limits on unsharded memory, secondary shards, and when memory is freed.
        bucketing_strategy: which parameters travel in one collective. ``"block"``: those of one block of the module
            tree (a child of a ModuleList or Sequential), and those of each module outside any block. The first and the
            last block are cut into several buckets if they have 3 MiB or more, because no compute hides their
            collectives. ``"layer"``: the parameters that one module owns directly. ``"none"``: each parameter in a
            bucket of its own. An int: consecutive parameters, until the bucket has that many bytes. A callable
            ``(parameter name, parameter) -> bucket name``. No bucket mixes dtypes, devices, process groups, or
            trainable and frozen parameters.
        prefetch: how many buckets ahead of its own wait an all-gather is issued. A bucket that is smaller than the
            gathered one (a norm, an edge piece of a block) counts by its share of the bytes. ZeRO-3 needs memory for
            about ``prefetch + 1`` unsharded buckets. 0 overlaps nothing. ``"auto"`` chooses the distance with the
            shortest simulated step. The default is ``"auto"`` with ``max_memory``, and 1 without it.
        max_memory: limit on all memory of a step on this rank (shards, unsharded buckets, activations, gradients,
            temporaries, inputs and outputs; not the optimizer's state), in bytes, as an int or a string such as
            ``"70GiB"``. If forward and backward would exceed it, backward computes values again instead of reading what
            forward saved: those whose recomputation takes the least time for what it frees at the peak. It works on
            values, not on modules, and changes no bit of the results. If memory is left, buckets stay unsharded until
            backward. The prefetch distance is chosen, too, unless ``prefetch`` is an int, and how many reductions may be
            in flight: two, as without a limit, or fewer if that spares recomputation. The step is then the fastest
            one simulated, and where the default (``prefetch=1``, nothing kept or recomputed) fits, nothing slower;
            ``.compiled[-1].choice`` shows the candidates, and ``.compiled[-1].memory`` the memory. Each trace is proved
            to keep the limit. A limit that no candidate keeps is an error with the bytes of the smallest. The default is
            no limit.
        accumulate: how gradients accumulate under ``no_sync``. ``"unsharded"``: whole, without communication; the backward
            that ends the window reduces the sum, so the fewest bytes are sent. ``"sharded"``: each backward reduces its
            own, and this rank's rows accumulate in the parameters' dtype, which needs the least memory. Across replicas
            both are reduced once, at the end. The default is ``"unsharded"``; with ``max_memory``, whichever of the two
            fits and is faster in the simulator.
        max_gathers_in_flight: limit on the all-gathers that are issued and not waited for, whatever their size. A gather
            that ``prefetch`` would issue earlier is issued right after the wait that makes room for it, so with 1 a
            gather still overlaps the compute of the step before. Each trace is proved to keep the limit, also one with
            a pinned ``schedule``. The default is no limit.
        cluster: the machine that the simulator assumes for ``prefetch="auto"`` and memory limits: a
            :class:`ClusterSpec` or the name of a preset. The default is the preset of the device at hand, or with a
            warning the nearest one. One rank searches for all.
        schedule: a schedule to replay instead of sorting: a file written by ``transform.save_schedules(path)``, or a
            :class:`StepSchedule`. A schedule that does not fit the trace is refused with an error that names the line.
        transport: how buckets travel, or a callable ``(bucket name, parameters) -> transport``. ``"flat"``: the bucket
            as one vector cut between rows, one collective and no copy. ``"all_to_all"``: gathers like flat; to reduce,
            ranks exchange pieces and sum them locally, which sends half the bytes of gloo's reduce-scatter.
            ``"coalesced"``: each parameter cut evenly, one launch for all collectives, no copy. ``"all_reduce"``: one
            all-reduce completes a buffer that holds each rank's shards in place, at twice the bytes.
            ``"symmetric_memory"``: copy engines read the memory of peers, with CUDA within a node. ``"auto"``:
            all_to_all with gloo; otherwise flat, or with NCCL coalesced where flat would need several collectives. The
            plan gives the reason.
        mp_policy: a :class:`~torch.distributed.fsdp.MixedPrecisionPolicy` of torch. Shards are cast to ``param_dtype``
            and then gathered. Gradients are averaged in ``reduce_dtype`` (the default is FSDP2's: before torch 2.15
            ``param_dtype``, from then on the parameters' dtype), and accumulated in it under ``no_sync`` unless
            ``accumulate="sharded"``. Shards, their gradients and the optimizer's state keep the parameters' dtype.
            ``cast_forward_inputs`` and ``output_dtype`` apply to the inputs and outputs of the
            jitted module. A callable ``(module name, module) -> policy`` decides for each module and the parameters
            that it owns directly, such as norms in float32; ``None`` means as for the module that contains it (for the
            root: no mixed precision). Like a module that FSDP2 wraps with the policy, a module for which it returns one
            also casts its inputs and outputs, which takes Thunder some tenths of a second to trace. Parameters with
            different dtypes are in different buckets. A field of a policy that this package does not know is refused.
        comm_policy: a :class:`~thunder_fsdp_sched.CommPolicy`: parameters are gathered, or gradients reduced, in low
            precision (``CommPolicy(gather="int8", reduce="bfloat16")``). Shards stay exact; the model computes with what
            is decoded. A callable ``(module name, module) -> policy`` decides as for ``mp_policy``.
        gradient_divide_factor: divide the sum of the gradients over ranks by this number, or a callable ``(module name,
            module) -> number`` that decides for each module, such as experts that are sharded over fewer ranks; ``None``
            means as for the module that contains it. The default is the number of ranks that share the parameter,
            replicas included, so gradients are the mean. :func:`set_gradient_divide_factor` changes it later, and tells
            the cost.
        all_reduce_hook: a callable ``(bucket name, gradients) -> None`` that modifies this rank's reduced gradients in
            place, for reductions over ranks that ``ranks`` does not have, as FSDP2's ``set_all_reduce_hook``. It runs on
            the current stream in the wait for each reduction, which the trace marks with its name, so what it sends
            overlaps no compute of backward unless the in-flight limit moves the wait forward. ``gradients`` is one flat
            vector in ``reduce_dtype`` (without replicas, sums of ``accumulate="sharded"`` are in the parameters' dtype
            if that is wider), the mean over ranks and replicas, before ``gradient_divide_factor``; its elements are in
            the same order on all ranks with this rank's index. The agreement of ranks includes the order of these
            calls, but not what they send, and the simulator does not know what they cost. An exception in it is one in
            backward. Under ``no_sync`` it does not run.
        offload_policy: a :class:`~torch.distributed.fsdp.CPUOffloadPolicy` of torch. Shards and their gradients, and
            thus the optimizer's state, are stored on the CPU, in pinned memory if the policy asks for it and the device
            is a GPU. A gather first copies the shard to ``device`` on a separate stream. The host waits for these
            copies and for each sharded gradient, so shards may be modified as soon as a forward or a backward has
            returned. If ``device`` is the CPU, the copies are still made, and no memory is saved.
        ranks: the ranks to shard over: a process group, a device mesh, or :class:`Ranks` for more. With two dimensions of a
            mesh, parameters are replicated across the first and sharded over the second, as in FSDP2 (hybrid sharding).
            The default is the default process group.
        init: where parameters are, and which values they begin with: see :class:`Init`.
        leaf_modules: submodules that are not traced: each call runs the module's own forward as it is, or as
            ``torch.compile`` has compiled it, and torch's autograd for its backward. In the trace it is one operator, so
            its parameters are gathered before it, and its gradients are reduced after it, as usual. ``"auto"``: those that
            Thunder cannot trace, each class with a warning. Or a sequence of names with ``*``
            (``"model.layers.*.mlp"``), classes, names of classes, and functions ``(name, module) -> bool``, each also in a
            pair with a function of the same arguments that returns tensors like the module's; then other modules that
            cannot be traced are errors, unless ``"auto"`` is among them. ``()``: everything is traced, or is an error. See
            :doc:`leaf-modules`.
        agree: how often ranks make sure that they do the same. ``"step"``: before the collectives of each forward and
            backward, in a round that overlaps compute; a rank that does something else is an error on all ranks that
            names both. ``"compile"``: only when they compile; a step exchanges no messages besides its collectives. What
            is lost: ranks whose steps differ (another branch, another number of batches, an exception on one rank) wait
            for each other until the timeout of the process group, or reduce gradients that do not belong together, and
            gloo may abort the process. Nothing is reused that needs the consent of all ranks: backward gathers all buckets
            that are not kept, each micro-batch of a window gathers again, and a kept bucket that another forward has
            overwritten before backward is an error. Parameters that no output with a gradient has used get a gradient of
            zeros instead of ``None``. The error of a save beside training is raised by the next save or ``result()``.
            ``"never"``: ranks do not compare what they have compiled either, so a rank may compile alone. Ranks that
            compute different things then average different gradients without an error.
        ranks_may_differ: let ranks run different programs in the same step: other branches, blocks or experts, blocks in
            another order, inputs of other shapes, or no batch at all (:func:`batches`, :func:`without_batch`). A rank then
            takes part in the collectives of the others, in one order that all have, and computes only its own part. A
            parameter has a gradient on all ranks if any of them has used it: the sum of what they computed, divided as
            usual. Ranks must still do the same kind of thing: forward or backward, with or without gradients, under
            ``no_sync`` or not, in training or not, after the same steps of optimizers. If they run the same program, a step
            costs what it costs without the option. A combination of programs that is new costs two all-gathers of some
            100 bytes for each collective, and a trace, without tracing by Thunder. Not with ``all_reduce_hook`` or
            secondary shards. See :doc:`ranks-differ`.
        debug: which checks run, and what may be left out to find a fault: see :class:`Debug`.

    Returns:
        A transform for one module. After ``thunder.jit``, ``.plan`` shows the buckets; after a call, ``.compiled``
        holds the traces and ``.schedules`` their communication.

    Raises:
        TypeError, ValueError: an option is invalid; the message names it. ``thunder.jit`` later raises RuntimeError if
            there is no process group, and TypeError or ValueError for a parameter that cannot be sharded.
    """
    if prefetch is None:
        prefetch = 1 if max_memory is None else "auto"
    options = Options(
        sharding_strategy=Sharding.of(sharding_strategy),
        bucketing_strategy=check_bucketing("bucketing_strategy", bucketing_strategy),
        prefetch=check_prefetch("prefetch", prefetch),
        max_memory=check_bytes("max_memory", max_memory),
        accumulate=check_accumulate("accumulate", accumulate),
        max_gathers_in_flight=check_gathers("max_gathers_in_flight", max_gathers_in_flight),
        cluster=check_cluster("cluster", cluster),
        schedule=check_schedule("schedule", schedule),
        transport=check_transport("transport", transport),
        mp_policy=or_by_module(check_mp_policy)("mp_policy", mp_policy),
        comm_policy=or_by_module(check_comm_policy)("comm_policy", comm_policy),
        gradient_divide_factor=or_by_module(check_factor)("gradient_divide_factor", gradient_divide_factor),
        all_reduce_hook=check_hook("all_reduce_hook", all_reduce_hook),
        offload_policy=check_offload_policy("offload_policy", offload_policy),
        ranks=Ranks.of(ranks),
        init=is_a(Init, "Init(...)")("init", init),
        leaf_modules=check_leaves("leaf_modules", leaf_modules),
        agree=check_agree("agree", agree),
        ranks_may_differ=flag("ranks_may_differ", ranks_may_differ),
        debug=is_a(Debug, "Debug(...)")("debug", Debug() if debug is None else debug),
    )
    return FSDPTransform(options, load("extras.planning.choosing") if options.needs_search else None)


register_plugin("fsdp-sched", lambda: load("extras.thunder_recipes:FSDPSched")())
