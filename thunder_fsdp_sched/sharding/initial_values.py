"""The values that parameters and buffers have before sharding: those of all ranks, of one rank, or still to be made.

[Note: One rank has the values]
With ``broadcast_from``, all other ranks may have made the module on the meta device, so that a host holds its values
once. The rank that broadcasts tells the others on which device it has each tensor. Tensors that it has on the meta
device are initialized by ``param_init_fn`` on all ranks; the others are broadcast. A rank receives the parameters one
after the other in the same memory, and keeps its rows. Buffers and ``ignored_params`` it receives whole.

[Note: Initial values]
A shard takes its rows from this rank's own parameter. If ranks initialize differently (another seed, another
checkpoint), the sharded parameter is a mixture that no rank has had, and nothing fails. So ranks compare a digest of
each parameter once: the sum of its bytes, read as 64-bit integers, with overflow. Unlike a sum of floats, it does not
depend on the order of additions, hence not on the number of threads. It reads each parameter once, which takes less
time than drawing its values, and one round through the store. One core of an AMD EPYC reads 6.7 to 8.7 GB/s::

    python -m timeit -s "import torch; torch.set_num_threads(1); x = torch.randn(4096, 4096)" \\
        "x.view(-1).view(torch.int64).sum()"

[Note: Uninitialized values]
Memory for tensors from the meta device is filled with ``nan``, or with an extreme integer. A tensor that has only such
values at the first call was not initialized: not by ``param_init_fn``, a checkpoint or the user. A version counter
would not show it, because initialization often writes through ``.data``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from thunder.core.module import ThunderModule

from ..options import Options
from ..ranks.control import Control
from ..ranks.process_groups import ProcessGroupRef
from .module_parameters import tensors_in_containers

_WHAT = (
    "the values of the parameters. Initialize them alike on all ranks (torch.manual_seed with one seed), or pass "
    "fsdp(init=Init(broadcast_from=0)); if a checkpoint is loaded into all of them later, pass "
    "fsdp(init=Init(allow_different_values=True))"
)


class ValueSource:
    """The rank whose values are sharded: this one, or with ``broadcast_from`` the same one for all.

    With ``broadcast_from``, creating it is a collective.

    Attributes:
        rank: the rank that broadcasts, if there is one.
        began_on_meta: names of tensors without values.
    """

    def __init__(self, model: ThunderModule, options: Options, control: Control) -> None:
        named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        registered = list(itertools.chain(*named))
        ids = {id(tensor) for _, tensor in registered}
        attributes = [(path, t) for path, t in tensors_in_containers(model._model) if id(t) not in ids]
        self._attributes = {path for path, _ in attributes}
        self._own = {name: tensor.device.type for name, tensor in (*registered, *attributes)}
        self._theirs = self._own
        self.rank = options.init.broadcast_from
        if self.rank is not None:
            is_source = control.is_single_rank or control.global_rank == self.rank
            devices = control.exchange("broadcast_from", self._own if is_source else None)
            self._theirs = next((theirs for theirs in devices if theirs is not None), self._own)
        self.began_on_meta = {name for name, t in registered if t.is_meta and not self.has_value(name)}

    def has_value(self, name: str) -> bool:
        """Return whether a tensor has a value, here or on the rank that broadcasts; otherwise it is to be initialized."""
        return self._theirs.get(name, self._own[name]) != "meta"

    def device_of(self, name: str, tensor: torch.Tensor) -> torch.device:
        """Return the device of a tensor, which it has on the rank that broadcasts if it is on the meta device here."""
        if tensor.is_meta and self.has_value(name):
            return resolve_device(torch.device(self._theirs[name]))
        return tensor.device

    def check(self, params: set[str], *, initializes: bool) -> None:
        """Raise an error, with ``broadcast_from``, if this rank cannot receive what the other one sends.

        Args:
            params: the names of the parameters to shard.
            initializes: whether ``param_init_fn`` is given.

        Raises:
            ValueError: it names the tensor.
        """
        if self.rank is None:
            return
        for name, own in self._own.items():
            theirs = self._theirs.get(name, own)  # names of parameters and buffers are compared later
            if theirs == "meta" and name in params and not initializes:
                raise ValueError(
                    f"Init: broadcast_from: the module is on the meta device on rank {self.rank} ({name!r}), so "
                    f"there is nothing to broadcast; pass param_init_fn to initialize it"
                )
            if own != theirs and name in self._attributes:
                raise ValueError(
                    f"Init: broadcast_from: attribute {name!r} is a tensor on {own}, and on {theirs} on rank "
                    f"{self.rank}. Only parameters and buffers are broadcast: make it one, "
                    f"register_buffer(..., persistent=False)"
                )
            if own not in (theirs, "meta"):
                raise ValueError(
                    f"Init: broadcast_from: {name!r} is on {own}, but on {theirs} on rank {self.rank}, which broadcasts "
                    f"it: make the module there as on this rank, or here on the meta device"
                )


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
        raise ValueError(
            f"device: {str(device)!r} is not available: {built}. Pass Init(device='cpu'), or leave device out"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"device: {str(device)!r} is not available: this process sees {torch.cuda.device_count()} GPUs. Pass "
            f"Init(device='cuda') after torch.cuda.set_device(local_rank)"
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
    with torch.no_grad():
        digests = [
            (f"{name}: digest {_sum_of_bytes(param).item() % 2**64:016x}", groups)
            for name, param, groups in params
            if not param.is_meta
        ]
    control.check_same_in_groups(_WHAT, [(group, line) for line, groups in digests for group in groups])


def _sum_of_bytes(param: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bytes of ``param`` as 64-bit integers, a 0-dim tensor on its device."""
    data = torch.view_as_real(param) if param.is_complex() else param
    raw = data.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # not aligned
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)


def make_blank(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with the value that :func:`is_blank` recognizes."""
    with torch.no_grad():
        tensor.fill_(_blank_of(tensor.dtype))


def is_blank(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is unchanged since :func:`make_blank`; false if it has no elements."""
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    tensor = tensor.detach()
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())
    return bool((tensor == _blank_of(tensor.dtype)).all())


def _blank_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return 0
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max
