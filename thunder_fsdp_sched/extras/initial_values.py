"""Initial values that this rank does not have: those of another rank, or of a function (``fsdp(init=Init(...))``).

[Note: One rank has the values]
With ``broadcast_from``, all other ranks may have made the module on the meta device, so that a host holds its values
once. The rank that broadcasts tells the others on which device it has each tensor. Tensors that it has on the meta
device are initialized by ``param_init_fn`` on all ranks; the others are broadcast. A rank receives the parameters one
after the other in the same memory, and keeps its rows. It receives buffers and ``ignored_params`` whole.

[Note: Uninitialized values]
Memory for tensors from the meta device is filled with ``nan``, or with an extreme integer. A tensor that has only such
values at the first call was not initialized: not by ``param_init_fn``, a checkpoint or the user. A version counter
would not show it, because initialization often writes through ``.data``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch import nn

from ..errors import coded_error
from ..options import Options
from ..private_torch import replace_data, state_name
from ..ranks.control import Control
from ..ranks.process_groups import BucketRanks
from ..sharding.initial_values import ShardedParam, ValueSource, resolve_device
from ..sharding.module_parameters import tensors_in_containers
from ..sharding.shard_module import ShardingSteps


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


def refuse_blank(model: ThunderModule, began_on_meta: Collection[str]) -> None:
    """Raise an error if parameters or buffers have not been initialized.

    Args:
        began_on_meta: the names of those that began without values.

    Raises:
        RuntimeError: names them.
    """
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    blank = [n for n, t in tensors.items() if t.is_meta or (n in began_on_meta and is_blank(t))]
    if blank:
        raise coded_error(
            RuntimeError,
            "parameter.no-values-yet",
            names=", ".join(blank[:3]),
            more=f" and {len(blank) - 3} more" if len(blank) > 3 else "",
        )


class RemoteValues(ValueSource):
    """The source of a module that has tensors on the meta device, or the values of another rank.

    With ``broadcast_from``, creating it is a collective.
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
        return self._theirs.get(name, self._own[name]) != "meta"

    def device_of(self, name: str, tensor: torch.Tensor) -> torch.device:
        if tensor.is_meta and self.has_value(name):
            return resolve_device(torch.device(self._theirs[name]))
        return tensor.device

    def check(self, params: AbstractSet[str], *, initializes: bool) -> None:
        if self.rank is None:
            return
        for name, own in self._own.items():
            theirs = self._theirs.get(name, own)  # names of parameters and buffers are compared later
            if theirs == "meta" and name in params and not initializes:
                raise coded_error(ValueError, "option.broadcast-from-meta-device", rank=self.rank, name=name)
            if own != theirs and name in self._attributes:
                raise coded_error(
                    ValueError, "option.broadcast-of-plain-tensor", name=name, own=own, theirs=theirs, rank=self.rank
                )
            if own not in (theirs, "meta"):
                raise coded_error(
                    ValueError, "option.broadcast-between-devices", name=name, own=own, theirs=theirs, rank=self.rank
                )

    def begin(self, steps: ShardingSteps) -> Callable[[ShardedParam], torch.Tensor]:
        # Parameters to receive share memory. Memory of their own would be freed too late: gloo refers to it for a while
        # after the broadcast.
        received: dict[torch.device, int] = defaultdict(int)
        for spec, param, *_ in steps.params:
            if not self.has_value(spec.name):
                bucket, index = steps.locations[spec.name]
                make_blank(bucket.shard_views[index])
            elif param.is_meta:
                device = self.device_of(spec.name, param)
                received[device] = max(received[device], param.nbytes)
        if steps.options.init.param_init_fn is not None:
            self._initialize(steps, steps.options.init.param_init_fn)
        first = steps.params[0].spec.device if steps.params else steps.options.init.device
        for name, tensor in steps.moved.items():
            if self.has_value(name):
                self._broadcast(steps.control, tensor, steps.assignment.default_ranks, first)
        buffers = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in received.items()}

        def values_of(param: ShardedParam) -> torch.Tensor:
            spec, whole = param.spec, param.param
            values: torch.Tensor = whole
            if whole.is_meta:
                buffer = buffers[self.device_of(spec.name, whole)]
                values = buffer[: whole.nbytes].view(whole.dtype).view(whole.shape)
            self._broadcast(steps.control, values, param.ranks, spec.device)
            return values

        return values_of

    def _initialize(self, steps: ShardingSteps, init: Callable[[nn.Module], object]) -> None:
        """Materialize the tensors that each submodule owns on the meta device, initialize them, and shard them.

        Submodules are visited in the order of the module tree, so random numbers are drawn as for the whole module.
        Besides the shards, only the tensors of one submodule exist at a time. Changes that ``init`` makes to other
        submodules are lost. Afterwards the sharded parameters are on the meta device again; all others are the same
        objects, with memory.
        """
        for path, submodule in steps.module.named_modules():
            on_meta = [
                (own, leaf, tensor, name)
                for own in (submodule._parameters, submodule._buffers)
                for leaf, tensor in own.items()
                if tensor is not None and tensor.is_meta and not self.has_value(name := f"{path}.{leaf}".lstrip("."))
            ]
            for own, leaf, tensor, name in on_meta:
                # In the dtype of the shards: the module's own parameter may already have that of unsharded parameters.
                dtype = steps.locations[name][0].spec.dtype if name in steps.locations else tensor.dtype
                real = torch.empty_like(tensor, device=steps.options.init.device, dtype=dtype)
                make_blank(real)
                own[leaf] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
            if on_meta:
                with torch.no_grad():
                    init(submodule)
            for own, leaf, tensor, name in on_meta:
                made = own[leaf]
                assert made is not None
                if isinstance(tensor, nn.Parameter):
                    own[leaf] = tensor
                if name in steps.locations:
                    self._broadcast(steps.control, made, steps.locations[name][0].ranks, steps.options.init.device)
                    steps.copy_in(name, made)
                    continue
                if isinstance(tensor, nn.Parameter):
                    replace_data(tensor, made.detach())
                    made = tensor
                self._broadcast(steps.control, made, steps.assignment.default_ranks, steps.options.init.device)
                steps.moved[name] = made

    @torch.no_grad()
    def _broadcast(self, control: Control, tensor: torch.Tensor, ranks: BucketRanks, via: torch.device | None) -> None:
        """With ``broadcast_from``, broadcast a tensor over its ranks, if necessary by way of the device ``via``."""
        if self.rank is not None:
            with control.doing("broadcast_from"):
                broadcast(tensor.detach(), self.rank, ranks, via=via)


def ignored_names(ignored: Iterable[str | nn.Parameter], named: Mapping[str, nn.Parameter]) -> set[str]:
    """Return all names of the ignored parameters.

    Raises:
        ValueError: one of them is not a parameter of the module.
    """
    found: set[str] = set()
    for wanted in ignored:
        is_name = isinstance(wanted, str)
        matches = [p for n, p in named.items() if (wanted in (n, state_name(n)) if is_name else p is wanted)]
        if not matches:
            what = repr(wanted) if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise coded_error(ValueError, "option.ignored-not-a-parameter", parameter=what)
        found |= {n for n, p in named.items() if any(p is match for match in matches)}
    return found


def broadcast(tensor: torch.Tensor, source: int, ranks: BucketRanks, *, via: torch.device | None = None) -> None:
    """Broadcast a tensor from the global rank ``source``, one of those that share it, to the others.

    Args:
        via: device from which to send a copy if the tensor's own device has no backend (a CPU, with NCCL only).

    Raises:
        ValueError: neither device has a backend.
    """
    can_send = all(group.backend_for(tensor.device) for group in ranks.groups)
    if not can_send:
        for group in ranks.groups:
            group.check_sends(via or tensor.device, f"a tensor of shape {tuple(tensor.shape)} for broadcast_from")
    if not can_send or not tensor.is_contiguous():  # bytes are sent, and strides may differ between ranks
        copy = (tensor if can_send else tensor.to(via)).contiguous()
        broadcast(copy, source, ranks)
        tensor.copy_(copy)
        return
    if ranks.replicas is not None and ranks.grid is not None:
        if source in ranks.replicas.global_ranks:
            dist.broadcast(tensor, src=source, group=ranks.replicas.process_group)
        # Now the rank in the column of `source` has it in each row of the mesh.
        rows = [list(row) for row in ranks.grid]
        own_row = next(row for row in rows if dist.get_rank() in row)
        source = own_row[next(row.index(source) for row in rows if source in row)]
    dist.broadcast(tensor, src=source, group=ranks.group.process_group)
