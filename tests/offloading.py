"""Offload activations that a test chooses, whatever ``max_memory`` would choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from unittest import mock

from thunder_fsdp_sched.extras.activation_offload.copies import HostCopy  # noqa: F401
from thunder_fsdp_sched.extras.activation_offload.offload_activations import offload_activations, offloadable
from thunder_fsdp_sched.extras.planning.clusters import cluster_of_this_process
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.search import copy_times
from thunder_fsdp_sched.transform import Compilation

from thunder.core.trace import TraceCtx

TIMES = copy_times(AnalyticCost(cluster_of_this_process()))
"""The times by which copies are placed."""


@contextlib.contextmanager
def offloading(choose: Callable[[dict[str, int]], Iterable[str]] = lambda found: found) -> Iterator[None]:
    """Let each compilation offload what ``choose`` selects from the offloadable values, by default all of them."""
    original = Compilation.after_fusion

    def after_fusion(self: Compilation, joint: TraceCtx) -> TraceCtx:
        joint = original(self, joint)
        offloaded = frozenset(choose(offloadable(joint, min_bytes=0)))
        self.context.copy_times = TIMES
        self.context.settings = replace(self.context.settings, offloaded=offloaded)
        return offload_activations(joint, offloaded=offloaded)

    with mock.patch.object(Compilation, "after_fusion", after_fusion):
        yield
