"""The options of :func:`thunder_fsdp_sched.fsdp`, validated.

Each option answers one question, and has one name everywhere: it is an argument of ``fsdp``, and a field of
:class:`Options`. If the question has several parts (which ranks, which initial values), the option is a dataclass of
``option_groups`` with a field for each part. An option that a function may decide for each module is also a field of
:class:`~thunder_fsdp_sched.plan.specs.BucketOptions`. See [Note: Declaring options] in ``option_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from . import option_checks as checks
from .errors import coded_error
from .extensions import load
from .ir.schedule import StepSchedule
from .option_groups import ByModule, Debug, Init, Option, OptionFields, Ranks, Sharding, option
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import BucketOptions, Encoding, ParamSpec
from .ranks.control import Agreement
from .runtime.accumulation import AccumulationMode

if TYPE_CHECKING:
    from .extras.planning.clusters import ClusterSpec


class Options(OptionFields):
    """The options of one transform; :func:`thunder_fsdp_sched.fsdp` documents them."""

    _: KW_ONLY
    sharding_strategy: Option[
        str | FSDPType | Callable[[str, torch.nn.Module], str | FSDPType | None] | Sharding, Sharding
    ] = option(default="zero3", check=Sharding.of)
    bucketing_strategy: Option[
        str | FSDPBucketingStrategy | int | Callable[[str, torch.nn.Parameter], str],
        BucketingStrategy | int | BucketRule,
    ] = option(default="block", check=checks.bucketing)
    prefetch: Option[int | Literal["auto"] | None, int | Literal["auto"]] = option(
        default=None,
        check=checks.or_word(
            "auto", checks.is_a(int, "a number of buckets (int), 'auto' or None", checks.at_least(0, "buckets"))
        ),
    )
    max_memory: Option[int | str | None, int | None] = option(default=None, check=checks.or_none(checks.nbytes))
    accumulate: Literal["unsharded", "sharded"] | None = option(
        default=None, check=checks.one_of(*get_args(AccumulationMode), None)
    )
    max_gathers_in_flight: int | None = option(
        default=None, check=checks.is_a(int, "a number of gathers (int) or None", checks.at_least(1, "gathers"))
    )
    cluster: Option[ClusterSpec | str | None, ClusterSpec | None] = option(default=None, check=checks.cluster)
    schedule: Option[str | Path | StepSchedule | None, tuple[StepSchedule, ...] | None] = option(
        default=None, check=checks.schedule
    )
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = option(default="auto", check=checks.transport)
    mp_policy: Option[
        MixedPrecisionPolicy | Callable[[str, torch.nn.Module], MixedPrecisionPolicy | None] | None,
        MixedPrecisionPolicy | ByModule,
    ] = option(default=None, check=checks.mixed_precision, by_module=True)
    comm_policy: Encoding | Callable[[str, torch.nn.Module], Encoding | None] | None = option(
        default=None, check=checks.encoding, by_module=True
    )
    gradient_divide_factor: float | Callable[[str, torch.nn.Module], float | None] | None = option(
        default=None, check=checks.factor, by_module=True
    )
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None = option(
        default=None, check=checks.function("(bucket name, gradients)", "None,"), captured=True
    )
    offload_policy: Option[OffloadPolicy | None, OffloadPolicy] = option(default=None, check=checks.offload)
    ranks: Option[ProcessGroup | DeviceMesh | Ranks | None, Ranks] = option(default=None, check=Ranks.of)
    init: Init = option(default=Init(), check=Init.of)
    leaf_modules: Option[
        Literal["auto"]
        | Sequence[str | type | Callable[[str, torch.nn.Module], bool] | tuple[Any, Callable[..., Any]]],
        tuple[Any, ...],
    ] = option(default="auto", check=checks.leaves)
    agree: Literal["step", "compile", "never"] = option(default="step", check=checks.one_of(*get_args(Agreement)))
    ranks_may_differ: bool = option(default=False, check=checks.flag)
    debug: Option[Debug | None, Debug] = option(default=None, check=Debug.of)

    def __post_init__(self) -> None:
        if vars(self)["prefetch"] is None:
            vars(self)["prefetch"] = 1 if self.max_memory is None else "auto"
        if self.init.param_init_fn is not None and self.init.device is None:  # Fabric adds its device to an Init
            raise coded_error(ValueError, "option.param-init-fn-without-device")
        if self.ranks_may_differ:
            load("extras.ranks_differ.conflicts:refuse_conflicts")(self)

    @property
    def needs_search(self) -> bool:
        """Whether the planner chooses settings: the prefetch distance, or settings that keep a limit on memory."""
        return self.prefetch == "auto" or self.max_memory is not None

    def by_module(self) -> Iterator[tuple[str, Any, checks.Check]]:
        """Yield each field of ``BucketOptions``, its option, and the check of values that functions of the module return."""
        in_sharding = {"sharding_strategy": "strategy", "secondary_ranks": "secondary_ranks"}
        for each in fields(BucketOptions):
            options: Any = self.sharding_strategy if each.name in in_sharding else self
            name = in_sharding.get(each.name, each.name)
            yield each.name, getattr(options, name), options.declared()[name].check

    def __str__(self) -> str:
        shown = ("bucketing_strategy", "prefetch", "transport")
        strategy = f"sharding_strategy={self.sharding_strategy.strategy!r}"
        return ", ".join([strategy, *(f"{name}={getattr(self, name)!r}" for name in shown)])
