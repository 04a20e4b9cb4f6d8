"""Memory of a step that its traces do not tell, by name, with an upper bound where there is one.

[Note: Unknown memory]
*Fusions* allocate what their compiler decides: at most what their subsymbols define and the fusion does not return.
*Operators without known facts* may allocate anything. *Kernels with workspaces* are base operators whose kernels allocate
memory that no operator returns; which and how much depends on the device, the library and the shapes. *Process groups*
may copy: gloo sends from copies, see :data:`_GLOO_BYTES`. On CUDA also the libraries allocate, and the caching allocator
cannot always use what is free.

Bytes are those of one bound symbol; on one stream two do not run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Effects, Issue, is_declared
from ...ir.inspection import nbytes_of, nested, outs_of, runs_nothing
from ...ir.operator_facts import facts_of, tensors_returned
from .value_memory import MemoryAnalysis

_CUBLAS_BYTES = 4096 * 8 * 1024
"""Bytes of torch's largest default workspace of cuBLAS, that for Hopper; see ``CUBLAS_WORKSPACE_CONFIG``."""

_GLOO_BYTES = 128 * 1024
"""Bytes that one collective of gloo allocates at most besides its copies of the tensor.

Measured with torch 2.13 on a CPU by counting ``malloc`` and ``free``, on 2, 3 and 4 ranks, for buckets of 256 bytes to
4 MiB, of one and of eight parameters, with every transport but ``symmetric_memory``. Of a bucket of N bytes over W ranks,
an all-gather and a reduce-scatter allocate at most N + N / W at once, an all-reduce N / W, an ``all_to_all`` exchange
nothing that grows with N. Besides, each of a bucket's segments took at most 10 KB, in ``coalesced`` reductions 36 KB.
"""

_MATMULS = frozenset(
    {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "linear", "_scaled_mm", "_grouped_mm"}
)
_OTHERS_WITH_WORKSPACES = (
    *("_scaled_dot_product_", "_flash_attention", "_efficient_attention"),
    *("convolution", "_convolution", "cudnn_", "mkldnn_", "miopen_", "slow_conv"),
    *("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"),
    *("argsort", "bincount", "cumsum", "embedding_dense_backward", "index_put", "_index_put_impl_", "kthvalue", "mode"),
    *("multinomial", "nonzero", "searchsorted", "sort", "topk", "unique", "_unique2"),
)
"""Prefixes of other base operators: their kernels may allocate a workspace."""

_EMBEDDING_BAGS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})


class UnknownMemory(NamedTuple):
    """Memory that is not counted, as it cannot be known from a trace.

    Attributes:
        name: the symbol, or the library.
        reason: why it is unknown.
        nbytes: upper bound in bytes at any one position; ``None`` if there is none.
        positions: schedule positions of the bound symbols; empty if it concerns the whole step.
    """

    name: str
    reason: str
    nbytes: int | None
    positions: tuple[int, ...]

    def __str__(self) -> str:
        bound = "no bound" if self.nbytes is None else f"at most {self.nbytes:,} bytes"
        at = f" at {len(self.positions)} position{'s' * (len(self.positions) > 1)}" if self.positions else ""
        return f"{self.name}: {bound}{at}, {self.reason}"


def unknown_memory(analysis: MemoryAnalysis, device_type: str) -> tuple[UnknownMemory, ...]:
    """Return the memory that is unknown, grouped by name and reason; see [Note: Unknown memory].

    Args:
        analysis: that of the traces of a step.
        device_type: the type of the device on which the step runs.
    """
    found: dict[tuple[str, str], tuple[int | None, list[int]]] = {}
    for position, bsym, e in zip(analysis.schedule_positions, analysis.bsyms, analysis.observed, strict=True):
        for name, reason, nbytes in _of(bsym, e, device_type):
            most, positions = found.get((name, reason), (0, []))
            bound = None if most is None or nbytes is None else max(most, nbytes)
            found[name, reason] = bound, [*positions, position]
    if device_type == "cuda":
        found["CUDA context and kernels", "allocated by the driver"] = None, []
        found["NCCL", "the channel buffers of its communicators"] = None, []
        found["fragmentation", "free memory that the caching allocator cannot use for a larger tensor"] = None, []
    return tuple(UnknownMemory(*key, bound, tuple(positions)) for key, (bound, positions) in found.items())


def _of(bsym: BoundSymbol, e: Effects, device_type: str) -> Iterator[tuple[str, str, int | None]]:
    """Return the names, reasons and bounds of what one bound symbol may allocate."""
    name = bsym.sym.name
    if runs_nothing(bsym):
        return
    if is_declared(bsym.sym):
        yield from _of_communication(e)
    elif bsym.sym.is_fusion:
        yield name, "a fusion allocates at most what it computes inside", _inside(bsym)
    elif e.operators is None and not facts_of(bsym).known and bsym.flat_proxy_outs:
        yield name, "an operator without known facts; its outputs count as views and as new memory", None
    elif e.operators is None and tensors_returned(bsym):
        yield name, "the call cannot be observed", None
    for operator in sorted(e.operators or ()):
        if operator in _MATMULS and device_type == "cuda":
            yield "cuBLAS", "a workspace for each handle and stream, which stays allocated", _CUBLAS_BYTES
        elif operator in _EMBEDDING_BAGS:
            yield name, f"{operator} makes one offset more than torch's rule for fake tensors", torch.int64.itemsize
        elif operator.startswith(_OTHERS_WITH_WORKSPACES):
            yield name, f"the kernel of {operator} may allocate a workspace", None


def _of_communication(e: Effects) -> Iterator[tuple[str, str, int | None]]:
    if e.hook:
        yield "all_reduce_hook", "what the user's function allocates", None
    issue, bucket = e.issues or e.runs, e.bucket
    if issue is None or issue.group is None or issue.resident or bucket is None:
        return
    transport = bucket.transport
    if issue.region is not None and not type(transport).__module__.startswith(__package__.partition(".")[0] + "."):
        yield f"transport {transport.name}", "a transport that is not of this package may allocate", None
    if issue.group.backend_for(bucket.spec.device) == "gloo" and not (
        issue.region is not None and transport.name == "symmetric_memory"
    ):
        yield "gloo", f"{issue.kind} sends from copies and receives into copies", _gloo_bytes(issue)


def _gloo_bytes(issue: Issue) -> int:
    """Return the most bytes that gloo allocates in one collective of a bucket; see :data:`_GLOO_BYTES`."""
    assert issue.group is not None and issue.bucket is not None
    part = -(-issue.nbytes // issue.group.size)
    if issue.region is None:  # across replicas
        return part + _GLOO_BYTES
    if issue.bucket.transport.name == "all_to_all" and not issue.gathers:
        copied = 0
    elif issue.bucket.transport.name == "all_reduce" and issue.gathers:
        copied = part
    else:
        copied = issue.nbytes + part
    return copied + len(issue.bucket.spec.layout.segments) * _GLOO_BYTES


def _inside(fusion: BoundSymbol) -> int:
    """Return the bytes of the tensors that the subsymbols of a fusion define and that it does not return."""
    tensors = {p.name: p for b in nested(fusion.subsymbols) for p in b.flat_proxy_outs if isinstance(p, TensorProxy)}
    return sum(nbytes_of(tensor) for name, tensor in tensors.items() if name not in outs_of(fusion))
