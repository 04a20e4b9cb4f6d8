"""The cost model: time and bytes of a bound symbol and of a collective on a described cluster.

[Note: Time of a bound symbol]
A kernel takes the longer of two times: its FLOPs at the device's peak for their dtype, and its bytes at the memory's
bandwidth. FLOPs are counted by the formulas of ``torch.utils.flop_counter``, for the bound symbol itself if there is
one, else for its subsymbols. Bytes are those of its inputs and outputs, so a fusion pays only for what enters and
leaves it.

A view runs no kernel and costs only host time. Whether an operator returns a view depends on the strides of its input,
which are observed (see [Note: Observed strides] in ``extras.step_memory.rows``). An expanded value does not occupy
the bytes of its shape.

[Note: Time of a collective]
A ring of W ranks sends W-1 of W pieces through every link, one after the other. That takes W-1 hops of latency, plus
the time of those bytes on the slowest link. Within a node that is a device's link. Between nodes, every node sends the
whole ring's traffic to the next node, but through the network interfaces of all its members of the group at once, as
NCCL's parallel rings do. So the bandwidth is the smaller of two: that of a device's link within the node, and ``members
of the group in a node x inter-node bandwidth``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Issue, is_declared
from ...ir.inspection import defined_by, nbytes_of, runs_nothing
from ...ir.observation import observe_call
from ..step_memory.costs import Costs, Row
from ..step_memory.rows import observed_costs
from .clusters import ClusterSpec, cluster


class Seconds(NamedTuple):
    """The cost of one bound symbol: seconds of the host that issues it, and of the device that computes it."""

    host: float
    device: float


class AnalyticCost:
    """The cost model that computes costs from the description of a cluster. Times are in seconds.

    Args:
        spec: the cluster, or the name of a preset.

    Attributes:
        synchronous: whether the host itself computes (CPU), so that issuing and computing coincide.
        contention: share of compute speed that is lost while a collective runs.

    Raises:
        ValueError: no preset has that name.
    """

    def __init__(self, spec: ClusterSpec | str) -> None:
        self.spec = cluster(spec)
        self.synchronous = self.spec.synchronous
        self.contention = self.spec.contention

    def __repr__(self) -> str:
        return f"AnalyticCost({self.spec.name})"

    def collective_seconds(self, issue: Issue) -> float:
        """Return the time of one collective alone on the link."""
        traffic, group = issue.traffic, issue.group
        assert traffic is not None and group is not None
        passes = traffic.passes * (self.spec.reduce_scatter_factor if traffic.is_reduce_scatter else 1.0)
        ranks = group.global_ranks
        seconds = sum(ring_seconds(self.spec, nbytes, ranks, passes=passes) for nbytes in traffic.messages)
        if not self.synchronous:  # the communication stream then copies
            seconds += traffic.copied_after / self.spec.bytes_per_second
            if issue.from_host:
                seconds += self.host_copy_seconds(issue.from_host)
        return seconds

    def host_copy_seconds(self, nbytes: int) -> float:
        """Return the time of a copy of so many bytes between a device and its host's memory."""
        if self.synchronous:  # reads and writes the same memory
            return 2 * nbytes / self.spec.bytes_per_second
        return nbytes / self.spec.host_bytes_per_second

    def seconds(self, row: Row) -> Seconds:
        """Return the cost of a bound symbol; for a collective or its wait, the work besides communication."""
        spec, costs = self.spec, row.costs
        if runs_nothing(row.bsym):
            return Seconds(0.0, 0.0)
        if (work := costs.work) is not None:
            # Gradients that were not written in place are copied into the slot; accumulating also reads the earlier sum.
            moved = work.moved_at_once if self.synchronous else work.moved
            kernels = len(row.copied) + (moved > 0)
            nbytes = work.touches * sum(map(nbytes_of, row.copied)) + moved
            device = nbytes / spec.bytes_per_second + kernels * spec.kernel_overhead
            if work.to_host:
                device += self.host_copy_seconds(work.to_host)
            return Seconds((work.launches + kernels) * spec.launch_overhead, device)
        is_view = (
            not is_declared(row.bsym.sym) and not row.effects.writes and not any(m.nbytes for m in costs.allocates)
        )
        if is_view:
            return Seconds(spec.launch_overhead, 0.0)
        computing = sum(flops / spec.flops_per_second(dtype) for dtype, flops in flops_of(row.bsym, costs).items())
        moving = bytes_of(row) / spec.bytes_per_second
        return Seconds(spec.launch_overhead, spec.kernel_overhead + max(computing, moving))


def ring_seconds(spec: ClusterSpec, nbytes: float, ranks: Sequence[int], *, passes: float = 1.0) -> float:
    """Return the time of a ring collective over ``ranks`` of a cluster whose nodes have consecutive ranks.

    See [Note: Time of a collective].

    Args:
        nbytes: bytes of the unsharded tensor.
        passes: how often each piece goes around the ring: 1 for an all-gather or a reduce-scatter, 2 for an all-reduce.
    """
    world_size = len(ranks)
    if world_size == 1 or not nbytes:
        return 0.0
    members = Counter(rank // spec.devices_per_node for rank in ranks).values()
    between = spec.inter_node_bandwidth * spec.efficiency.inter_node * min(members)
    within = spec.intra_node_bandwidth * spec.efficiency.intra_node
    slowest = min([within] * (max(members) > 1) + [between] * (len(members) > 1))
    crossings = len(members) - 1
    inside = world_size - 1 - crossings
    sent = nbytes * (world_size - 1) / world_size
    return min(
        p.start
        + passes * (inside * p.intra_node_hop + crossings * p.inter_node_hop + sent / slowest / p.bandwidth_share)
        for p in spec.protocols
    )


def bytes_of(row: Row) -> int:
    """Return the bytes that a bound symbol reads and writes: its distinct inputs and its outputs.

    An operator that selects elements reads only as much as it writes.
    """
    tensors = [p for p in row.bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    inputs = {p.name: _occupied(p, row.strides.get(p.name)) for p in tensors}
    written = sum(nbytes_of(p) for p in defined_by(row.bsym) if isinstance(p, TensorProxy))
    if not _SELECTING.isdisjoint(row.costs.operators or ()):
        return sum(min(size, written) for size in inputs.values()) + written
    return sum(inputs.values()) + written


def _occupied(tensor: TensorProxy, strides: tuple[int, ...] | None) -> int:
    """Return the bytes that a tensor occupies, without repetitions in an expanded one."""
    if strides is None:
        return nbytes_of(tensor)
    return tensor.dtype.bytes * math.prod(int(n) for n, stride in zip(tensor.shape, strides, strict=True) if stride)


_SELECTING = frozenset({"gather", "index_select", "take"})
"""Base operators that read only as much as they return. An embedding counts its whole table: if it cost less, the
planner would recompute it, and backward would gather the table, which the cost of recomputation does not include."""


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    PrimIDs.LINEAR: torch.nn.functional.linear,
    PrimIDs.MATMUL: torch.matmul,
    PrimIDs.CONVOLUTION: torch.convolution,
}
"""The functions of prims that multiply matrices, which a fusion may contain."""

_ATTENTION = {
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention": (0, 2),
    "sdpaex_scaled_dot_product_efficient_attention_backward": (1, 5),
    "sdpafx_grad_forward_scaled_dot_product_efficient_attention": (0, 2),
    "sdpafx_scaled_dot_product_efficient_attention_backward": (1, 5),
    "cudnn_sdpa_fwd": (0, 2),
    "cudnn_sdpa_bwd": (1, 5),
    "fa3_fwd": (0, 2),
    "fa3_bwd": (1, 5),
    "torch_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "torch_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
    "scaled_dot_product_attention": (0, 2),
}
"""Attention in one kernel: the index of its query, and the number of its matrix products.

The formulas of ``flop_counter`` ignore causality. Fused kernels skip the part above the diagonal, which is half of the work
if there are as many queries as keys.
"""


def flops_of(bsym: BoundSymbol, known: Costs | None = None) -> Mapping[torch.dtype, int]:
    """Return the FLOPs of a bound symbol by dtype; those of its subsymbols if it cannot be observed.

    Args:
        known: its observed costs; by default those for contiguous inputs.
    """
    if bsym.sym.name in _ATTENTION:
        return _of_attention(bsym)
    observed = (known or observed_costs(bsym, {})).flops
    if observed is not None:
        return observed
    if bsym.sym.id in _FUNCTIONS and (calls := observe_call(bsym, _FUNCTIONS[bsym.sym.id], {})):
        return calls[0].flops or {}
    flops: Counter[torch.dtype] = Counter()
    for sub in bsym.subsymbols:
        flops.update(flops_of(sub))
    return flops


def _of_attention(bsym: BoundSymbol) -> dict[torch.dtype, int]:
    first, products = _ATTENTION[bsym.sym.name]
    query, key = bsym.args[first : first + 2]
    axis = 1 if bsym.sym.name.startswith("fa3") else 2  # the axis of the sequence
    length, keys = int(query.shape[axis]), int(key.shape[axis])
    flops = 2 * products * math.prod(map(int, query.shape)) * keys
    causal = any(arg is True for arg in bsym.args[first + 3 :]) or bsym.kwargs.get("is_causal", False)
    return {to_torch_dtype(query.dtype): flops // 2 if causal and length == keys else flops}
