"""Compare the initial values of the ranks; loaded if there are several ranks.

[Note: Initial values]
A shard takes its rows from this rank's own parameter. If ranks initialize differently (another seed, another
checkpoint), the sharded parameter is a mixture that no rank has had, and nothing fails. So ranks compare a digest of
each parameter once, in one round. It is the sum of its 32-bit words, each multiplied by a random 64-bit number for its
position, modulo 2^64 (the multilinear hash of Carter and Wegman). So the same rows in another order, or two signs
swapped, change it. Integers make it the same for any number of threads and on any device. It reads each parameter once,
which takes less time than drawing its values. One core of an Intel Xeon at 2.8 GHz reads 1.2 to 2 GB/s, and draws 0.8::

    python -m timeit -s "import torch; torch.set_num_threads(1); x = torch.randn(4096, 4096); \\
        from thunder_fsdp_sched.sharding.initial_digests import Digest" "Digest().of(x)"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..ranks.control import Control
from ..ranks.process_groups import ProcessGroupRef

_WHAT = (
    "the values of the parameters. Initialize them alike on all ranks (torch.manual_seed with one seed), or pass "
    "fsdp(init=Init(broadcast_from=0)); if a checkpoint is loaded into all of them later, pass "
    "fsdp(init=Init(allow_different_values=True))"
)


def check_initial_values(
    control: Control, params: Iterable[tuple[str, torch.Tensor, Sequence[ProcessGroupRef]]]
) -> None:
    """Raise an error if ranks that share a parameter have different values of it; parameters on meta are skipped.

    Args:
        params: names, values, and the groups whose ranks must have the same values.

    Raises:
        ScheduleDisagreement: on every rank; it names the first parameter that differs.
    """
    digest = Digest()
    with torch.no_grad():
        digests = [
            (f"{name}: digest {digest.of(param):016x}", groups) for name, param, groups in params if not param.is_meta
        ]
    control.check_same_in_groups(_WHAT, [(group, line) for line, groups in digests for group in groups])


class Digest:
    """A function of the bytes of tensors and of their order: see [Note: Initial values]."""

    _CHUNK = 1 << 16
    """The number of words multiplied at a time, so that intermediate results stay in the cache."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """Return a 64-bit digest of a tensor's bytes, in which shape and dtype do not count."""
        data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        raw = data.detach().contiguous().reshape(-1).view(torch.uint8)
        if raw.numel() % 4:
            raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
        if raw.storage_offset() % 4:  # not aligned
            raw = raw.clone()
        chunks = raw.view(torch.int32).split(self._CHUNK)
        factors = self._factors_on(raw.device)
        sums = torch.stack([torch.mul(chunk, factors[: chunk.numel()]).sum() for chunk in chunks])
        return self.of(sums) if len(sums) > 1 else int(sums.item()) % 2**64

    def _factors_on(self, device: torch.device) -> torch.Tensor:
        """Return a random number for each position, the same on all ranks: splitmix64 of the position."""
        if device not in self._factors:
            numbers = torch.arange(1, self._CHUNK + 1, device=device) * -0x61C8864680B583EB
            for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
                without_sign = (numbers >> shift) & ((1 << (64 - shift)) - 1)
                numbers = (numbers ^ without_sign) * factor
            self._factors[device] = numbers
        return self._factors[device]
