"""Groups of options of :func:`thunder_fsdp_sched.fsdp`: dataclasses, each of which answers one question."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from thunder.distributed import FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .errors import coded_error
from .ir.schedule import StepSchedule
from .option_checks import (
    check_bytes,
    check_device,
    check_group_rule,
    check_ignored,
    check_init_fn,
    check_mesh,
    check_names,
    check_process_group,
    check_rank,
    check_secondary_ranks,
    check_strategy,
    flag,
    or_by_module,
)
from .plan.specs import ShardingStrategy
from .ranks.messages import remark
from .ranks.process_groups import ProcessGroupRef

ByModule = Callable[[str, torch.nn.Module], Any]
"""A function of (module name, module) that decides an option for each module."""


COMPARED_BY_EFFECT: dict[str, bool] = {"compared": False}
"""Metadata of a field that refers to objects of this process: ranks compare its effect, not the option."""

WITH_CAPTURED_VALUES: dict[str, bool] = {"captured": True}
"""Metadata of a field whose function may not capture other values on other ranks; of others, ranks compare the answers."""


def lines_of(options: Any, name: str) -> Iterator[str]:
    """Yield one line for each option of a dataclass that must be the same on all ranks."""
    for each in fields(options):
        value = getattr(options, each.name)
        if isinstance(value, OptionGroup):
            yield from (f"{name}({each.name}={line})" for line in lines_of(value, type(value).__name__))
        elif each.metadata.get("compared", True):
            yield f"{name}({each.name}={_comparable(value, each.metadata.get('captured', False))})"


def _comparable(value: Any, captured: bool) -> str:
    """Return a string that is equal on all ranks if the option is.

    Args:
        captured: see [Note: Comparing functions] in ``callables``.
    """
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, DeviceMesh):
        return f"mesh of {tuple(value.shape)} ranks, dimensions {value.mesh_dim_names}"
    if isinstance(value, tuple):
        schedules = [step for step in value if isinstance(step, StepSchedule)]
        computes = [(s.forward.compute, s.backward and s.backward.compute) for s in schedules]
        return str(computes) if computes else f"({', '.join(_comparable(each, captured) for each in value)})"
    if isinstance(value, (MixedPrecisionPolicy, OffloadPolicy)):
        of_fields = [f"{f.name}={_comparable(getattr(value, f.name), captured)}" for f in fields(value)]
        return f"{type(value).__name__}({', '.join(of_fields)})"
    if isinstance(value, type):
        return value.__qualname__
    if not callable(value):
        return str(value)
    from .callables import describe, place_of  # here, because most options are no functions

    return describe(value, captured=captured) + remark(place_of(value))


class OptionGroup:
    """A frozen dataclass whose fields are options with defaults."""

    def _set(self, **checked: Any) -> None:
        """Set the fields, which are frozen afterwards."""
        vars(self).update(checked)

    def __repr__(self) -> str:
        default = type(self)()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


@dataclass(frozen=True, init=False, repr=False)
class Sharding(OptionGroup):
    """How long each bucket is unsharded, and which memory it may use: ``fsdp(sharding_strategy=Sharding(...))``.

    Args:
        strategy: ``"zero3"`` frees unsharded parameters after forward and gathers them again for backward; ``"zero2"``
            keeps them until their gradients are reduced. A callable ``(module name, module) -> strategy`` decides for each
            module and the parameters that it owns directly; ``None`` means as for the module that contains it (for the
            root: ``"zero3"``).
        max_unsharded_bytes: limit on all unsharded memory (gathered buckets and unsharded gradients) in bytes, as an
            int or a string such as ``"40GiB"``. Buckets stay unsharded until backward if they fit and do not slow the
            simulated step down. With ``prefetch="auto"`` both are chosen together for the shortest simulated step; if
            ``prefetch=1`` with nothing kept fits, nothing slower is chosen. ``.compiled[-1].choice`` shows the
            candidates. Not with ``"zero2"``. The default is no limit.
        secondary_ranks: a number of ranks, as for FSDP2's ``reshard_after_forward``: with ``"zero3"``, ranks keep a part of
            each bucket from forward to backward (a secondary shard), such that so many successive ranks together have
            the whole bucket, and backward gathers only among them. If these ranks are one node, no gather of backward
            leaves it. Each rank needs the bytes of all parameters in the dtype of gathers, divided by this number, until
            backward has gathered them. The number divides the ranks that share a bucket. A callable ``(module name,
            module) -> number`` decides for each module; ``None``, also the default, means all ranks that share it.
        reshard_after_backward: whether each micro-batch of an accumulation window (``no_sync``) gathers again the
            buckets that stay unsharded until backward. By default only the first one gathers them: later ones reuse what
            is there, as long as no rank has changed a parameter or run something else with the model. ``True`` is needed
            only if kernels of others change parameters within a window, which torch cannot see.
        release: whether the memory of unsharded buckets is given back to the allocator at the end of backward, so that the
            optimizer or another model can use it. By default slots are allocated while traces are compiled, and a step
            allocates none. With ``True`` a forward without gradients frees everything at its end, too. Not for several
            forwards before their backwards or ``retain_graph=True`` with ``"zero2"``: backward then raises an error.

    Raises:
        TypeError, ValueError: an argument is invalid or conflicts with another; the message names it.
    """

    strategy: ShardingStrategy | ByModule = "zero3"
    max_unsharded_bytes: int | None = None
    secondary_ranks: int | ByModule | None = None
    reshard_after_backward: bool = False
    release: bool = False

    def __init__(
        self,
        strategy: str | FSDPType | Callable[[str, torch.nn.Module], str | FSDPType | None] = "zero3",
        *,
        max_unsharded_bytes: int | str | None = None,
        secondary_ranks: int | Callable[[str, torch.nn.Module], int | None] | None = None,
        reshard_after_backward: bool = False,
        release: bool = False,
    ) -> None:
        self._set(
            strategy=or_by_module(check_strategy)("Sharding: strategy", strategy),
            max_unsharded_bytes=check_bytes("Sharding: max_unsharded_bytes", max_unsharded_bytes),
            secondary_ranks=or_by_module(check_secondary_ranks)("Sharding: secondary_ranks", secondary_ranks),
            reshard_after_backward=flag("Sharding: reshard_after_backward", reshard_after_backward),
            release=flag("Sharding: release", release),
        )
        if self.strategy == "zero2" and self.secondary_ranks is not None:
            raise coded_error(ValueError, "option.secondary-ranks-with-zero2")
        if self.strategy == "zero2" and self.max_unsharded_bytes is not None:
            raise coded_error(ValueError, "option.max-unsharded-bytes-with-zero2")

    @classmethod
    def of(cls, given: Any) -> Sharding:
        """Return the argument ``sharding_strategy`` of ``fsdp`` in full."""
        if isinstance(given, Sharding):
            return given
        return cls(or_by_module(check_strategy)("sharding_strategy", given))


@dataclass(frozen=True, init=False, repr=False)
class Ranks(OptionGroup):
    """Which ranks share each parameter, and how they are connected: ``fsdp(ranks=Ranks(...))``.

    Args:
        process_group: the ranks to shard over. The default is the default process group.
        mesh: a device mesh to shard over, instead of ``process_group``. With two dimensions, parameters are replicated
            across the first and sharded over the second, as in FSDP2 (hybrid sharding). Along the dimension over which
            they are sharded, ranks ascend.
        process_group_for: a callable ``(parameter name, parameter) -> process group``, 1-D or 2-D mesh, or ``None`` for
            the usual ranks. Use it for parameters, such as experts, that are sharded over a subset of the ranks of
            ``mesh`` or ``process_group``. Their gradients are averaged over that subset.
        separate_reduce_scatter_group: use separate communicators for reductions, so that no gather queues after one.

    Raises:
        TypeError, ValueError: an argument is invalid or conflicts with another; the message names it.
    """

    process_group: ProcessGroupRef | None = field(default=None, metadata=COMPARED_BY_EFFECT)
    mesh: DeviceMesh | None = None
    process_group_for: Callable[[str, torch.nn.Parameter], Any] | None = None
    separate_reduce_scatter_group: bool = False

    def __init__(
        self,
        process_group: ProcessGroup | ProcessGroupRef | None = None,
        mesh: DeviceMesh | None = None,
        process_group_for: Callable[[str, torch.nn.Parameter], ProcessGroup | DeviceMesh | None] | None = None,
        separate_reduce_scatter_group: bool = False,
    ) -> None:
        self._set(
            process_group=check_process_group("Ranks: process_group", process_group),
            mesh=check_mesh("Ranks: mesh", mesh),
            process_group_for=check_group_rule("Ranks: process_group_for", process_group_for),
            separate_reduce_scatter_group=flag("Ranks: separate_reduce_scatter_group", separate_reduce_scatter_group),
        )
        if self.mesh is not None and self.process_group is not None:
            raise coded_error(ValueError, "option.mesh-and-process-group")

    @classmethod
    def of(cls, given: Any) -> Ranks:
        """Return the argument ``ranks`` of ``fsdp`` in full."""
        if isinstance(given, Ranks):
            return given
        if isinstance(given, DeviceMesh):
            return cls(mesh=check_mesh("ranks", given))
        if given is None or isinstance(given, ProcessGroup):
            return cls(given)
        raise coded_error(TypeError, "option.wrong-type-of-ranks", got=given, type=type(given).__name__)


@dataclass(frozen=True, init=False, repr=False)
class Init(OptionGroup):
    """Where parameters are, and which values they begin with: ``fsdp(init=Init(...))``.

    Args:
        device: the device of shards and unsharded parameters. The default is each parameter's own. ``"cuda"`` without
            an index is the GPU that is current when ``thunder.jit`` is called.
        param_init_fn: initializes a module on the meta device: ``lambda module: module.reset_parameters()``. It is
            called once for each submodule and sets the parameters and buffers that this submodule owns directly. They
            are materialized on ``device`` one at a time, so the whole module is never in memory. Without it, parameters
            on the meta device must be loaded (:func:`load_checkpoint`, :func:`load_safetensors`) before the first call.
            It needs a ``device``.
        broadcast_from: global rank whose parameters and buffers all ranks copy. The others may have made the module on the
            meta device; a rank then receives one parameter at a time, and keeps its rows. What that rank has on the meta
            device, too, ``param_init_fn`` initializes. By default every rank must initialize the same values.
        ignored_params: parameters, or their names, that stay whole on every rank. Their gradients are not reduced.
        allow_different_values: let ranks begin with different values of a parameter, of which each shard then
            keeps this rank's rows; for values that are all loaded later. By default :class:`ScheduleDisagreement` names
            the first parameter that differs. The check reads every parameter once (over 1 GB/s for each CPU thread) and is
            skipped on the meta device and with ``broadcast_from``.

    Raises:
        TypeError: an argument is invalid; the message names it.
    """

    device: torch.device | None = None
    param_init_fn: Callable[[torch.nn.Module], object] | None = None
    broadcast_from: int | None = None
    ignored_params: tuple[torch.nn.Parameter | str, ...] = field(default=(), metadata=COMPARED_BY_EFFECT)
    allow_different_values: bool = False

    def __init__(
        self,
        device: torch.device | str | None = None,
        param_init_fn: Callable[[torch.nn.Module], object] | None = None,
        broadcast_from: int | None = None,
        ignored_params: Iterable[torch.nn.Parameter | str] = (),
        allow_different_values: bool = False,
    ) -> None:
        self._set(
            device=check_device("Init: device", device),
            param_init_fn=check_init_fn("Init: param_init_fn", param_init_fn),
            broadcast_from=check_rank("Init: broadcast_from", broadcast_from),
            ignored_params=check_ignored("Init: ignored_params", ignored_params),
            allow_different_values=flag("Init: allow_different_values", allow_different_values),
        )


def _checks_passes() -> bool:
    return os.environ.get("THUNDER_FSDP_SCHED_CHECK_PASSES") == "1"


@dataclass(frozen=True, repr=False, kw_only=True)
class Debug(OptionGroup):
    """Which checks run, and what may be left out to find a fault: ``fsdp(debug=Debug(...))``.

    Args:
        audit: check during the first run of each compiled trace that no operator returns memory of a slot or modifies
            an unsharded parameter, unless the plan expects it. Later runs cost nothing.
        differentiate_once: differentiate one of several modules whose forwards have the same operators, and copy its joint
            trace for the others. The result is the same up to names. Likewise, modes that compute the same, such as
            ``no_sync``, share a joint trace. ``False`` lets Thunder differentiate each module, in each mode.
        skip_passes: names of passes to leave out, of those that the table of passes in *How it works* does not call
            required. A step gives the same numbers without them, but is slower or needs more memory.
        check_passes: check the trace after each pass: each name is defined once, before it is read. By default only if the
            variable ``THUNDER_FSDP_SCHED_CHECK_PASSES`` of the environment is 1.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    audit: bool = True
    differentiate_once: bool = True
    skip_passes: tuple[str, ...] = ()
    check_passes: bool = field(default_factory=_checks_passes, metadata=COMPARED_BY_EFFECT)

    def __post_init__(self) -> None:
        check_names("Debug: skip_passes", self.skip_passes)
        for each in fields(self):
            if each.name != "skip_passes":
                flag(f"Debug: {each.name}", getattr(self, each.name))
