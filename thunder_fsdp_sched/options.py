"""The options of :func:`thunder_fsdp_sched.fsdp`, validated.

Each option answers one question, and has one name everywhere: an argument of ``fsdp``, and a field of :class:`Options`. If
the question has several parts (which ranks, which initial values), the option is a dataclass of ``option_groups`` with a
field for each. What functions may decide for each module is also a field of
:class:`~thunder_fsdp_sched.plan.specs.BucketOptions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .errors import coded_error
from .extensions import load
from .option_groups import WITH_CAPTURED_VALUES, ByModule, Debug, Init, Ranks, Sharding, lines_of
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import Encoding, ParamSpec
from .ranks.control import Agreement
from .runtime.accumulation import AccumulationMode

if TYPE_CHECKING:
    from .extras.planning.clusters import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The validated options of one transform; :func:`thunder_fsdp_sched.fsdp` documents them."""

    sharding_strategy: Sharding
    bucketing_strategy: BucketingStrategy | int | BucketRule
    prefetch: int | Literal["auto"]
    max_memory: int | None
    accumulate: AccumulationMode | None
    max_gathers_in_flight: int | None
    cluster: ClusterSpec | None
    schedule: tuple[Any, ...] | None  # of `StepSchedule`
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str]
    mp_policy: MixedPrecisionPolicy | ByModule
    comm_policy: Encoding | ByModule | None
    gradient_divide_factor: float | ByModule | None
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None = field(metadata=WITH_CAPTURED_VALUES)
    offload_policy: OffloadPolicy
    ranks: Ranks
    init: Init
    leaf_modules: tuple[Any, ...]
    agree: Agreement
    ranks_may_differ: bool
    debug: Debug

    def __post_init__(self) -> None:
        if self.init.param_init_fn is not None and self.init.device is None:  # Fabric adds its device to an Init
            raise coded_error(ValueError, "option.param-init-fn-without-device")
        if self.ranks_may_differ:
            load("extras.ranks_differ.conflicts:refuse_conflicts")(self)

    @property
    def needs_search(self) -> bool:
        """Whether the planner chooses settings: the prefetch distance, or what keeps a limit on memory."""
        return self.prefetch == "auto" or (self.max_memory, self.sharding_strategy.max_unsharded_bytes) != (None, None)

    def by_module(self) -> dict[str, Any]:
        """Return the options that functions may decide for each module, by the fields of ``BucketOptions``."""
        return {
            "sharding_strategy": self.sharding_strategy.strategy,
            "mp_policy": self.mp_policy,
            "comm_policy": self.comm_policy,
            "gradient_divide_factor": self.gradient_divide_factor,
            "secondary_ranks": self.sharding_strategy.secondary_ranks,
        }

    def lines(self) -> list[str]:
        """Return one line for each option that must be the same on all ranks."""
        return list(lines_of(self, "fsdp"))

    def __str__(self) -> str:
        shown = ("bucketing_strategy", "prefetch", "transport")
        strategy = f"sharding_strategy={self.sharding_strategy.strategy!r}"
        return ", ".join([strategy, *(f"{name}={getattr(self, name)!r}" for name in shown)])
