"""The declaration of options, and the options of :func:`thunder_fsdp_sched.fsdp` with several parts, as dataclasses.

[Note: Declaring options]
An option is declared once, as a field of a subclass of ``OptionFields``. It has a name, a type, and a call of ``option``
with its default and its check. If the check converts the user's value, the type is ``Option[type given, type kept]``. In the
constructor, type checkers and ``inspect.signature`` see the type given. ``fsdp`` has the parameters of the constructor of
``Options``. An option is documented under ``Args`` of its class; options of ``Options``, in the docstring of ``fsdp``.
"""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Generic, TypeVar, overload

import torch
from thunder.distributed import FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from typing_extensions import Self, dataclass_transform

from . import option_checks as checks
from .errors import coded_error
from .ir.schedule import StepSchedule
from .plan.specs import ShardingStrategy
from .ranks.process_groups import ProcessGroupRef

ByModule = Callable[[str, torch.nn.Module], Any]
"""A function of (module name, module) that decides an option for each module."""

Given = TypeVar("Given")
Kept = TypeVar("Kept")


@dataclass(eq=False)
class Option(Generic[Given, Kept]):
    """A field that checks and converts what it is set to; see [Note: Declaring options].

    Args:
        default: the default, as a user would give it.
        check: returns the value to keep, or raises TypeError or ValueError with the option's name. Also accepts kept values.
        by_module: whether users may give a function of (module name, module) instead, whose results are checked.
        compared: ``False`` for objects of this process: ranks compare their effect, not the option.
        captured: whether a function must capture the same values on all ranks; for other functions, ranks compare results.
    """

    default: Given
    check: checks.Check
    by_module: bool = False
    compared: bool = True
    captured: bool = False

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self._label = name, f"{owner.__name__}: {name}" if issubclass(owner, OptionGroup) else name
        annotation = owner.__annotations__[name]
        if annotation.startswith("Option["):  # of the constructor, too
            types: Any = ast.parse(annotation, mode="eval").body
            owner.__annotations__[name] = ast.unparse(types.slice.elts[0])

    @overload
    def __get__(self, options: None, owner: type) -> Given: ...

    @overload
    def __get__(self, options: object, owner: type) -> Kept: ...

    def __get__(self, options: object | None, owner: type) -> Any:
        return self.default if options is None else vars(options)[self.name]

    def __set__(self, options: object, value: Given) -> None:
        vars(options)[self.name] = self.checked(self._label, value)

    def checked(self, name: str, value: Any) -> Any:
        """Check a user's value, and return the value to keep; errors contain ``name``."""
        if self.by_module and callable(value) and not isinstance(value, type):
            return checks.takes("(module name, module)")(name, value)
        return self.check(name, value)


def option(*, default: Any, check: checks.Check, **more: Any) -> Any:
    """Declare an option; see :class:`Option`."""
    return Option(default, check, **more)


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
class OptionFields:
    """The base of frozen dataclasses whose fields are options."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    @classmethod
    def declared(cls) -> dict[str, Option[Any, Any]]:
        bases = reversed(cls.__mro__)
        return {name: each for base in bases for name, each in vars(base).items() if isinstance(each, Option)}

    def with_kept(self, **kept: Any) -> Self:
        """Return a copy with other kept values, without checking them again: a check may warn of a user's value."""
        new = copy.copy(self)
        vars(new).update(kept)
        return new

    def lines(self, name: str) -> Iterator[str]:
        """Yield one line, which starts with ``name``, for each option that must be the same on all ranks."""
        for each in self.declared().values():
            value = getattr(self, each.name)
            if isinstance(value, OptionGroup):
                yield from (f"{name}({each.name}={line})" for line in value.lines(type(value).__name__))
            elif each.compared:
                yield f"{name}({each.name}={_comparable(value, each.captured)})"

    def __repr__(self) -> str:
        default = type(self)()
        given = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class OptionGroup(OptionFields):
    """The parts of an option."""

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        """Return the argument ``name`` of ``fsdp`` as an instance of this class."""
        return checks.is_a(cls, f"{cls.__name__}(...)")(name, given)


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
    from .ranks.messages import remark

    return describe(value, captured=captured) + remark(place_of(value))


class Sharding(OptionGroup):
    """How long each bucket stays unsharded, and which memory it uses: ``fsdp(sharding_strategy=Sharding(...))``.

    Args:
        strategy: ``"zero3"`` frees unsharded parameters after forward and gathers them again for backward; ``"zero2"``
            keeps them until their gradients are reduced. A callable ``(module name, module) -> strategy`` decides for each
            module and the parameters that it owns directly; ``None`` means as for the module that contains it (for the
            root: ``"zero3"``).
        secondary_ranks: a number of ranks, as for FSDP2's ``reshard_after_forward``: with ``"zero3"``, each rank keeps a
            part of each bucket from forward to backward (a secondary shard). This many successive ranks together have
            the whole bucket, and backward gathers only among them. If these ranks are one node, no gather of backward
            leaves it. Until backward has gathered it, this takes the bytes of all parameters in the dtype of gathers,
            divided by this number. The number must divide the number of ranks that share a bucket. A callable
            ``(module name, module) -> number`` decides for each module; ``None``, also the default, means all ranks that
            share it.
        reshard_after_backward: whether each micro-batch of an accumulation window (``no_sync``) gathers again the
            buckets that stay unsharded until backward. By default only the first one gathers them. Later ones reuse
            them, as long as no rank has changed a parameter or run something else with the model. ``True`` is needed
            only if custom kernels, which torch cannot see, change parameters within a window.
        release: whether the memory of unsharded buckets is returned to the allocator at the end of backward, so that the
            optimizer or another model can use it. By default slots are allocated while traces are compiled, and a step
            allocates none. With ``True`` a forward without gradients frees everything at its end, too. Not for several
            forwards before their backwards or ``retain_graph=True`` with ``"zero2"``: backward then raises an error.

    Raises:
        TypeError, ValueError: an argument is invalid or conflicts with another; the message names it.
    """

    strategy: Option[
        str | FSDPType | Callable[[str, torch.nn.Module], str | FSDPType | None], ShardingStrategy | ByModule
    ] = option(default="zero3", check=checks.strategy, by_module=True)
    _: KW_ONLY
    secondary_ranks: int | Callable[[str, torch.nn.Module], int | None] | None = option(
        default=None,
        check=checks.is_a(
            int, "a number of ranks or None", checks.at_least(2, "ranks (the strategy 'zero2' keeps whole parameters)")
        ),
        by_module=True,
    )
    reshard_after_backward: bool = option(default=False, check=checks.flag)
    release: bool = option(default=False, check=checks.flag)

    def __post_init__(self) -> None:
        if self.strategy == "zero2" and self.secondary_ranks is not None:
            raise coded_error(ValueError, "option.secondary-ranks-with-zero2")

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        return given if isinstance(given, cls) else cls(cls.declared()["strategy"].checked(name, given))


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

    process_group: Option[ProcessGroup | ProcessGroupRef | None, ProcessGroupRef | None] = option(
        default=None,
        check=checks.is_a(
            (ProcessGroup, ProcessGroupRef),
            "a torch.distributed.ProcessGroup or None",
            lambda _, group: ProcessGroupRef.of(group) if isinstance(group, ProcessGroup) else group,
        ),
        compared=False,
    )
    mesh: DeviceMesh | None = option(default=None, check=checks.mesh)
    process_group_for: Callable[[str, torch.nn.Parameter], ProcessGroup | DeviceMesh | None] | None = option(
        default=None, check=checks.function("(parameter name, parameter)", "process group, mesh")
    )
    separate_reduce_scatter_group: bool = option(default=False, check=checks.flag)

    def __post_init__(self) -> None:
        if self.mesh is not None and self.process_group is not None:
            raise coded_error(ValueError, "option.mesh-and-process-group")

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        if isinstance(given, DeviceMesh):
            return cls(mesh=checks.mesh(name, given))
        if given is None or isinstance(given, ProcessGroup):
            return cls(given)
        expected = "a torch.distributed.ProcessGroup, a 1-D or 2-D DeviceMesh, Ranks(...) or None"
        return checks.is_a(cls, expected)(name, given)


class Init(OptionGroup):
    """Where parameters are, and which values they start with: ``fsdp(init=Init(...))``.

    Args:
        device: the device of shards and unsharded parameters. The default is each parameter's own. ``"cuda"`` without
            an index is the GPU that is current when ``thunder.jit`` is called.
        param_init_fn: initializes a module on the meta device: ``lambda module: module.reset_parameters()``. It is
            called once for each submodule and sets the parameters and buffers that this submodule owns directly. They
            are materialized on ``device`` one at a time, so the whole module is never in memory. Without it, parameters
            on the meta device must be loaded (:func:`load_checkpoint`, :func:`load_safetensors`) before the first call.
            It needs a ``device``.
        broadcast_from: global rank whose parameters and buffers all ranks copy. The others may create the module on the
            meta device; a rank then receives one parameter at a time, and keeps its rows. ``param_init_fn`` initializes
            parameters that are on the meta device on that rank, too. By default every rank must initialize the same values.
        ignored_params: parameters, or their names, that stay whole on every rank. Their gradients are not reduced.
        allow_different_values: let ranks start with different values of a parameter; each rank keeps the rows of its
            own. Use it if all values are loaded later. By default :class:`ScheduleDisagreement` names
            the first parameter that differs. The check reads every parameter once (over 1 GB/s for each CPU thread) and is
            skipped on the meta device and with ``broadcast_from``.

    Raises:
        TypeError: an argument is invalid; the message names it.
    """

    device: Option[torch.device | str | None, torch.device | None] = option(default=None, check=checks.device)
    param_init_fn: Callable[[torch.nn.Module], object] | None = option(
        default=None, check=checks.is_a(Callable, "a callable that initializes a module, or None")
    )
    broadcast_from: int | None = option(default=None, check=checks.is_a(int, "a global rank (int) or None"))
    ignored_params: Option[Iterable[torch.nn.Parameter | str], tuple[torch.nn.Parameter | str, ...]] = option(
        default=(), check=checks.parameters, compared=False
    )
    allow_different_values: bool = option(default=False, check=checks.flag)


def _checks_passes(name: str, value: bool | None) -> bool:
    default = os.environ.get("THUNDER_FSDP_SCHED_CHECK_PASSES") == "1"
    return checks.flag(name, default if value is None else value)


class Debug(OptionGroup):
    """Which checks run, and what to leave out to find a fault: ``fsdp(debug=Debug(...))``.

    Args:
        audit: check during the first run of each compiled trace that no operator returns memory of a slot or modifies
            an unsharded parameter, unless the plan expects it. Later runs cost nothing. With Thunder's
            ``cache="no caching"`` nothing is audited.
        differentiate_once: differentiate one of several modules whose forwards have the same operators, and copy its joint
            trace for the others. The result is the same up to names. Likewise, modes that compute the same, such as
            ``no_sync``, share a joint trace. ``False`` lets Thunder differentiate each module, in each mode.
        skip_passes: names of passes to leave out, except those that the table of passes in *How it works* marks as
            required. A step gives the same numbers without them, but is slower or needs more memory.
        check_passes: check the trace after each pass: each name is defined once, before it is read. By default only if the
            environment variable ``THUNDER_FSDP_SCHED_CHECK_PASSES`` is 1.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    _: KW_ONLY
    audit: bool = option(default=True, check=checks.flag)
    differentiate_once: bool = option(default=True, check=checks.flag)
    skip_passes: tuple[str, ...] = option(default=(), check=checks.names)
    check_passes: Option[bool | None, bool] = option(default=None, check=_checks_passes, compared=False)

    @classmethod
    def of(cls, name: str, given: Any) -> Self:
        return cls() if given is None else super().of(name, given)
