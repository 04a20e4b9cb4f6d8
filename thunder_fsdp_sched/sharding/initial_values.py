"""Compare the values of parameters on all ranks before they are sharded.

[Note: Initial values]
A shard takes its rows from this rank's own parameter. If ranks initialize differently (another seed, another
checkpoint), the sharded parameter is a mixture that no rank has had, and nothing fails. So ranks compare a digest of
each parameter once: the sum of its bytes, read as 64-bit integers, with overflow. Unlike a sum of floats, it does not
depend on the order of additions, hence not on the number of threads. It reads each parameter once, which takes less
time than drawing its values, and one round through the store. One core of an AMD EPYC reads 6.7 to 8.7 GB/s::

    python -m timeit -s "import torch; torch.set_num_threads(1); x = torch.randn(4096, 4096)" \\
        "x.view(-1).view(torch.int64).sum()"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..agreement.consistency import Agreement
from ..options import Options
from ..plan.specs import GroupKey, ParamSpec
from .group_assignment import GroupAssignment

__all__ = ["check_initial_values"]

_WHAT = (
    "the values of the parameters. Initialize them alike on all ranks (torch.manual_seed with one seed), or pass "
    "fsdp(broadcast_from=0); if a checkpoint is loaded into all of them later, pass "
    "fsdp(allow_different_initialization=True)"
)


def check_initial_values(
    specs: Sequence[tuple[ParamSpec, torch.nn.Parameter]],
    group_keys: dict[str, GroupKey],
    options: Options,
    assignment: GroupAssignment,
    agreement: Agreement,
) -> None:
    """Raise an error if ranks that share a parameter have different values of it; parameters on meta are skipped.

    A collective of all ranks that share parameters. It does nothing if one rank broadcasts its values, if the check is
    switched off, and if there is only one rank.

    Raises:
        ScheduleDisagreement: on every rank; it names the first parameter that differs.
    """
    if options.broadcast_from is not None or options.allow_different_initialization or agreement.is_single_rank:
        return
    digests = _digests([(spec.name, param) for spec, param in specs if not param.is_meta])
    for key in dict.fromkeys(group_keys.values()):
        lines = [f"{s.name}: {digests[s.name]}" for s, _ in specs if group_keys[s.name] == key and s.name in digests]
        ranks = assignment.ranks(key)
        if options.process_group_for is None:
            groups = [agreement.group]  # with replicas, all of them at once
        else:
            groups = [ranks.group, *([ranks.replicas] if ranks.replicas is not None else [])]
        for group in groups:
            agreement.about("initial values", group).check_same(_WHAT, lines)


def _digests(params: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return a digest of each parameter; one transfer to the host for each device."""
    sums: dict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    with torch.no_grad():
        for name, param in params:
            sums[param.device][name] = _sum_of_bytes(param)
        return {
            name: f"digest {value % 2**64:016x}"
            for of_device in sums.values()
            for name, value in zip(of_device, torch.stack(list(of_device.values())).tolist(), strict=True)
        }


def _sum_of_bytes(param: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes of ``param`` as 64-bit integers, a 0-dim tensor on its device."""
    data = torch.view_as_real(param) if param.is_complex() else param
    raw = data.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # not aligned
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)
