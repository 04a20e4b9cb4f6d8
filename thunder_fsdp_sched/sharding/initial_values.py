"""The values that parameters and buffers have before sharding: by default, those that every rank has.

[Note: Initial values]
A shard takes its rows from this rank's own parameter. If ranks initialize differently (another seed, another
checkpoint), the sharded parameter is a mixture that no rank has had, and nothing fails. So ranks compare a digest of
each parameter once, in one round. It is the sum of its 32-bit words, each multiplied by a random 64-bit number for its
position, modulo 2^64 (the multilinear hash of Carter and Wegman). So the same rows in another order, or two signs
swapped, change it. Integers make it the same for any number of threads and on any device. It reads each parameter once,
which takes less time than drawing its values. One core of an Intel Xeon at 2.8 GHz reads 1.2 to 2 GB/s, and draws 0.8::

    python -m timeit -s "import torch; torch.set_num_threads(1); x = torch.randn(4096, 4096); \\
        from thunder_fsdp_sched.sharding.initial_values import Digest" "Digest().of(x)"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from thunder.core.module import ThunderModule

from ..errors import coded_error
from ..extensions import load
from ..options import Options
from ..plan.specs import ParamSpec
from ..ranks.control import Control
from ..ranks.process_groups import BucketRanks, ProcessGroupRef

_WHAT = (
    "the values of the parameters. Initialize them alike on all ranks (torch.manual_seed with one seed), or pass "
    "fsdp(init=Init(broadcast_from=0)); if a checkpoint is loaded into all of them later, pass "
    "fsdp(init=Init(allow_different_values=True))"
)


class ShardedParam(NamedTuple):
    """A parameter to shard.

    Attributes:
        param: the jitted module's object. Another transform may have created it.
        own: the original module's object; ``param`` if that has none.
        ranks: the ranks that share it.
    """

    spec: ParamSpec
    param: torch.nn.Parameter
    own: torch.nn.Parameter
    ranks: BucketRanks


class ValueSource:
    """This rank, all of whose tensors have values; ``extras.initial_values`` has the source of others.

    Attributes:
        rank: the rank that broadcasts, if there is one.
        began_on_meta: names of tensors without values.
    """

    rank: int | None = None
    began_on_meta: AbstractSet[str] = frozenset()

    def has_value(self, name: str) -> bool:
        """Return whether a tensor has a value, here or on the rank that broadcasts; otherwise it is to be initialized."""
        return True

    def device_of(self, name: str, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor, which it has on the rank that broadcasts if it is on the meta device here."""
        return tensor.device

    def check(self, params: AbstractSet[str], *, initializes: bool) -> None:
        """Raise an error, with ``broadcast_from``, if this rank cannot receive what the other one sends.

        Args:
            params: the names of the parameters to shard.
            initializes: whether ``param_init_fn`` is given.

        Raises:
            ValueError: it names the tensor.
        """

    def begin(self, steps: Any) -> Callable[[ShardedParam], torch.Tensor]:
        """Initialize tensors without values, and fill those that are not sharded.

        Returns:
            a function that returns the values of a parameter, whose rows the caller copies before the next call.
        """
        return lambda param: param.param


def source_of(model: ThunderModule, options: Options, control: Control) -> ValueSource:
    """Return the source of the values of a module; a collective with ``broadcast_from``."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    if options.init.broadcast_from is None and not any(tensor.is_meta for _, tensor in tensors):
        return ValueSource()
    source: ValueSource = load("extras.initial_values.source:RemoteValues")(model, options, control)
    return source


def resolve_device(device: torch.device) -> torch.device:
    """Return ``device`` as the ``device`` of a tensor there: a GPU always has an index, a CPU never.

    A GPU without an index means the current one of this process. Thunder would read it as ``cuda:0`` on every rank,
    while inputs and parameters may be on ``cuda:1``.

    Raises:
        ValueError: there is no such GPU.
    """
    if device.type != "cuda":
        return torch.device("cpu") if device.type == "cpu" else device
    if not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.backends.cuda.is_built() else "this build of torch has no CUDA support"
        raise coded_error(ValueError, "option.no-gpu-for-device", device=str(device), reason=built)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise coded_error(
            ValueError, "option.device-index-too-high", device=str(device), gpus=torch.cuda.device_count()
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


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
    """How many words are multiplied at a time, so that what is in between stays in the cache."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """Return the digest of a tensor of given shape and dtype, a number of 64 bits."""
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
