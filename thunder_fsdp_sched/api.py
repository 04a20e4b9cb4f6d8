"""The public entry points: :func:`fsdp`, and the plugin "fsdp-sched" of ``thunder.compile(model, plugins=[...])``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar
from typing import ParamSpec as Arguments  # the package's ParamSpec is another one

import torch
from thunder.plugins import register_plugin

from .errors import coded_error
from .extensions import load
from .options import Options
from .transform import FSDPTransform

P = Arguments("P")
R = TypeVar("R")


def _with_parameters_of(options: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the parameters of a constructor, by name; errors of other arguments say what to write instead."""
    signature = inspect.signature(options)

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            if args and isinstance(args[0], torch.nn.Module):
                raise coded_error(TypeError, "option.model-passed-to-fsdp")
            if args:
                raise coded_error(TypeError, "option.positional-arguments", got=args[0])
            for name in given.keys() - signature.parameters:
                raise load("extras.foreign_names:unknown_option")(name, signature.parameters)
            return function(**given)

        described: Any = call
        described.transform_module = _refuse_uncalled
        described.__annotations__ = {**options.__init__.__annotations__, "return": call.__annotations__["return"]}
        described.__signature__ = signature.replace(return_annotation=call.__annotations__["return"])
        return call

    return decorate


def _refuse_uncalled(model: torch.nn.Module) -> NoReturn:
    raise coded_error(TypeError, "option.fsdp-not-called")


@_with_parameters_of(Options)
def fsdp(**given: Any) -> FSDPTransform:
    """Return a transform that shards a module: ``thunder.jit(model, transforms=[fsdp(...)])``.

    ``thunder.jit`` shards the module immediately. After that, its parameters are DTensors that hold this rank's rows, in
    one flat buffer per bucket. Only then create optimizers, and take parameters for hooks and groups. Code that would
    mistake rows for whole parameters raises an error.

    On any number of ranks, a step costs at most two gathers and one reduction for each bucket, and two rounds of agreement
    (``agree``). A rank receives the unsharded parameters twice and sends their gradients once.

    Args:
        sharding_strategy: ``"zero3"`` frees unsharded parameters after their last use in forward and gathers them again
            in backward. This needs the least memory and 1.5 times the communication of ``"zero2"``. Buckets that are
            still resident when backward starts are not gathered again. ``"zero2"`` keeps all parameters unsharded until
            backward has used them. A callable ``(module name, module) -> strategy`` decides for each module and the
            parameters that it owns directly; ``None`` means as for the module that contains it (for the root
            ``"zero3"``). Parameters with different strategies are in different buckets. :class:`Sharding` combines one of
            these with more: secondary shards, when micro-batches gather again, and when memory is freed.
        bucketing_strategy: which parameters travel in one collective. ``"block"``: those of one block of the module
            tree (a child of a ModuleList or Sequential), and those of each module outside any block. The first and the
            last block are cut into several buckets if they have 3 MiB or more, because no compute hides their
            collectives. ``"layer"``: the parameters that one module owns directly. ``"none"``: each parameter in a
            bucket of its own. An int: consecutive parameters, until the bucket has that many bytes. A callable
            ``(parameter name, parameter) -> bucket name``. No bucket mixes dtypes, devices, process groups, or
            trainable and frozen parameters.
        prefetch: how many buckets ahead of its own wait an all-gather is issued. A smaller bucket in between (a norm, an
            edge piece) counts only as its share of the gathered bucket's bytes. ZeRO-3 needs memory for
            about ``prefetch + 1`` unsharded buckets. 0 overlaps nothing. ``"auto"`` chooses the distance with the
            shortest simulated step. The default is ``"auto"`` with ``max_memory``, and 1 without it.
        max_memory: limit on all memory of a step on this rank (shards, unsharded buckets, activations, gradients,
            temporaries, inputs and outputs; not the optimizer's state), in bytes, as an int or a string such as
            ``"70GiB"``. If forward and backward would exceed it, backward recomputes values that forward would
            otherwise save: those that cost the least time per byte that they free at the peak. It chooses single values,
            not modules, and results stay bit for bit the same. If memory is left, buckets stay unsharded until
            backward. The prefetch distance is chosen, too, unless ``prefetch`` is an int, and how many reductions may be
            in flight: two, as without a limit, or fewer if that saves recomputation. The fastest simulated candidate
            wins, so if the default (``prefetch=1``, nothing kept or recomputed) fits, nothing slower is chosen.
            ``.compiled[-1].choice`` shows the candidates, and ``.compiled[-1].memory`` the memory. Each trace is proved
            to keep the limit. If no candidate keeps it, an error states the bytes of the smallest. The default is no
            limit.
        accumulate: how gradients accumulate under ``no_sync``. ``"unsharded"``: whole gradients accumulate, without
            communication, and the backward that ends the window reduces the sum. This sends the fewest bytes.
            ``"sharded"``: each backward reduces its gradients, and this rank's rows accumulate in the parameters' dtype.
            This needs the least memory. Across replicas, both are reduced once, at the end. The default is
            ``"unsharded"``; with ``max_memory``, whichever of the two fits and is faster in the simulator.
        max_gathers_in_flight: limit on the all-gathers that are issued and not waited for, whatever their size. A gather
            that ``prefetch`` would issue earlier is issued right after the wait that makes room for it, so with 1 a
            gather still overlaps the compute of the bucket before it. Each trace is proved to keep the limit, even with
            a pinned ``schedule``. The default is no limit.
        cluster: the machine that the simulator assumes for ``prefetch="auto"`` and memory limits: a
            :class:`ClusterSpec` or the name of a preset. The default is the preset of the device at hand, or with a
            warning the nearest one. One rank searches for all.
        schedule: a schedule to replay instead of sorting: a file written by ``transform.save_schedules(path)``, or a
            :class:`StepSchedule`. A schedule that does not fit the trace is refused with an error that names the line.
        transport: how buckets travel, or a callable ``(bucket name, parameters) -> transport``. ``"flat"``: the bucket
            as one vector cut between rows, one collective and no copy. ``"all_to_all"``: gathers like flat; to reduce,
            ranks exchange pieces and sum them locally, which sends half the bytes of gloo's reduce-scatter.
            ``"coalesced"``: each parameter cut evenly, with NCCL one launch for all collectives, no copy.
            ``"all_reduce"``: one all-reduce completes a buffer that holds each rank's shards in place, at twice the
            bytes. ``"symmetric_memory"``: copy engines read the memory of peers, with CUDA within a node. ``"auto"``:
            all_to_all with gloo; otherwise flat, or with NCCL coalesced where flat would need several collectives. The
            plan gives the reason.
        mp_policy: a :class:`~torch.distributed.fsdp.MixedPrecisionPolicy` of torch. Shards are cast to ``param_dtype``
            and then gathered. Gradients are averaged in ``reduce_dtype`` (the default is FSDP2's: before torch 2.15
            ``param_dtype``, from then on the parameters' dtype), and accumulated in it under ``no_sync`` unless
            ``accumulate="sharded"``. Shards, their gradients and the optimizer's state keep the parameters' dtype.
            ``cast_forward_inputs`` and ``output_dtype`` apply to the inputs and outputs of the
            jitted module. A callable ``(module name, module) -> policy`` decides for each module and the parameters
            that it owns directly, such as norms in float32; ``None`` means as for the module that contains it (for the
            root: no mixed precision). A module for which the callable returns a policy also casts its inputs and
            outputs, as in FSDP2; tracing these casts takes Thunder some tenths of a second. Parameters with
            different dtypes are in different buckets. A field of a policy that this package does not know is refused.
        comm_policy: a :class:`~thunder_fsdp_sched.CommPolicy`: parameters are gathered, or gradients reduced, in low
            precision (``CommPolicy(gather="int8", reduce="bfloat16")``). Shards stay exact; the model computes with
            decoded values. A callable ``(module name, module) -> policy`` decides as for ``mp_policy``.
        gradient_divide_factor: divide the sum of the gradients over ranks by this number, or a callable ``(module name,
            module) -> number`` that decides for each module, such as experts that are sharded over fewer ranks; ``None``
            means as for the module that contains it. The default is the number of ranks that share the parameter,
            replicas included, so gradients are the mean. :func:`set_gradient_divide_factor` changes it later, at a cost
            that it documents.
        all_reduce_hook: a callable ``(bucket name, gradients) -> None`` that modifies this rank's reduced gradients in
            place, for reductions over ranks that ``ranks`` does not have, as FSDP2's ``set_all_reduce_hook``. It runs on
            the current stream, in the wait for each reduction; the trace shows its name there. So its communication
            overlaps no compute of backward unless the in-flight limit moves the wait forward. ``gradients`` is one flat
            vector in ``reduce_dtype`` (without replicas, sums of ``accumulate="sharded"`` are in the parameters' dtype
            if that is wider), the mean over ranks and replicas, before ``gradient_divide_factor``; its elements are in
            the same order on all ranks with this rank's index. Ranks agree on the order of these calls, but not on
            what the hook sends, and the simulator does not know its cost. An exception in the hook counts as one in
            backward. Under ``no_sync`` the hook does not run.
        offload_policy: a :class:`~torch.distributed.fsdp.CPUOffloadPolicy` of torch. Shards and their gradients, and
            thus the optimizer's state, are stored on the CPU, in pinned memory if the policy asks for it and the device
            is a GPU. A gather first copies the shard to ``device`` on a separate stream. The host waits for these
            copies and for each sharded gradient, so shards may be modified as soon as a forward or a backward has
            returned. If ``device`` is the CPU, the copies are still made, and no memory is saved.
        ranks: the ranks to shard over: a process group, a device mesh, or :class:`Ranks` for more. With two dimensions of a
            mesh, parameters are replicated across the first and sharded over the second, as in FSDP2 (hybrid sharding).
            The default is the default process group.
        init: where parameters are, and which values they start with: see :class:`Init`.
        leaf_modules: submodules that are not traced: each call runs the module's own forward, compiled if ``torch.compile``
            has compiled it, and torch's autograd computes its backward. In the trace it is one operator, so its parameters
            are gathered before it, and its gradients are reduced after it, as usual. ``"auto"``: those that Thunder cannot
            trace, each class with a warning. Or a sequence of names with ``*`` (``"model.layers.*.mlp"``), classes, names
            of classes, and functions ``(name, module) -> bool``. Each of these may be in a pair with a function of the same
            arguments that returns tensors like the module's. With a sequence, other modules that cannot be traced are
            errors, unless it contains ``"auto"``. ``()``: everything is traced, or is an error. See :doc:`leaf-modules`.
        agree: how often ranks check that they run the same program. ``"step"``: before the collectives of each forward and
            backward, in a round that overlaps compute; if a rank differs, all ranks raise an error that names both
            programs. ``"compile"``: only when they compile; a step exchanges no messages besides its collectives. But then
            ranks whose steps differ (another branch, another number of batches, an exception on one rank) wait
            for each other until the timeout of the process group, or reduce gradients that do not belong together, and
            gloo may abort the process. Nothing is reused that all ranks would have to agree on: backward gathers all
            buckets that are not kept, each micro-batch of a window gathers again, and a kept bucket that another forward
            has overwritten before backward is an error. Parameters that no output with a gradient has used get a gradient
            of zeros instead of ``None``. The error of an asynchronous save is raised by the next save or ``result()``.
            ``"never"``: ranks do not even compare what they have compiled, so a rank may compile alone. Ranks that
            compute different things then average different gradients without an error.
        ranks_may_differ: let ranks run different programs in the same step: different branches, blocks or experts, another
            order of blocks, inputs of different shapes, or no batch at all (:func:`batches`, :func:`without_batch`). A rank
            then takes part in the collectives of the others, in one order for all, and computes only its own part. A
            parameter has a gradient on all ranks if any of them has used it: the sum of what they computed, divided as
            usual. Ranks must still do the same kind of thing: forward or backward, with or without gradients, under
            ``no_sync`` or not, in training or not, after the same steps of optimizers. If they run the same program, a step
            costs what it costs without the option. A new combination of programs costs two all-gathers of some
            100 bytes for each collective, and a trace, without tracing by Thunder. Not with ``all_reduce_hook`` or
            secondary shards. See :doc:`ranks-differ`.
        debug: which checks run, and what to leave out to find a fault: see :class:`Debug`.

    Returns:
        A transform for one module. After ``thunder.jit``, ``.plan`` shows the buckets; after a call, ``.compiled``
        holds the traces and ``.schedules`` their communication.

    Raises:
        TypeError, ValueError: an option is invalid; the message names it. ``thunder.jit`` later raises RuntimeError if
            there is no process group, and TypeError or ValueError for a parameter that cannot be sharded.
    """
    options = Options(**given)
    return FSDPTransform(options, load("extras.planning.choosing") if options.needs_search else None)


register_plugin("fsdp-sched", lambda: load("extras.thunder_recipes:FSDPSched")())
