"""Refusals of options and calls that do not work for ranks that differ."""

from __future__ import annotations

from typing import Any

import thunder
import torch
from thunder.core.options import CACHE_OPTIONS

from ...errors import coded_error
from ...options import Options


def refuse_conflicts(options: Options) -> None:
    """Raise ValueError for options that ``ranks_may_differ`` excludes."""
    for option, is_given, why in (
        (
            "all_reduce_hook",
            options.all_reduce_hook,
            "it may communicate, and ranks that differ call it at other places",
        ),
        (
            "Sharding: secondary_ranks",
            options.sharding_strategy.secondary_ranks,
            "a rank that skips a bucket in forward has no secondary shard of it",
        ),
        (f"agree={options.agree!r}", options.agree != "step", "ranks find out in each step in what they differ"),
    ):
        if is_given:
            raise coded_error(ValueError, "option.conflicts-with-ranks-may-differ", option=option, reason=why)


def refuse_cache(model: torch.nn.Module) -> None:
    """Raise ValueError for a cache that may run the trace of another branch."""
    if thunder.cache_option(model) is CACHE_OPTIONS.SYMBOLIC_VALUES:
        raise coded_error(ValueError, "option.symbolic-cache-with-ranks-may-differ")


def refuse_changes(transforms: str) -> None:
    """Raise ValueError for transforms that change traces after ``fsdp(...)``: merged traces do not go through them."""
    raise coded_error(ValueError, "ranks.later-transform-changed-trace", transforms=transforms)


def refuse_join(**options: Any) -> None:
    """Refuse ``torch.distributed.algorithms.Join``, which asks each of its members for this hook.

    A rank that has joined does not call its optimizer, so its rows of all parameters would not be updated any more.
    """
    raise coded_error(NotImplementedError, "ranks.join-not-supported")
