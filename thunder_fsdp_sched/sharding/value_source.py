"""The values that parameters and buffers have before sharding: this rank's own, or those of one rank for all.

[Note: One rank has the values]
With ``broadcast_from``, all other ranks may have made the module on the meta device, so that a host holds its values
once. The rank that broadcasts tells the others on which device it has each tensor. Tensors that it has on the meta
device are initialized by ``param_init_fn`` on all ranks; the others are broadcast. A rank receives the parameters one
after the other in the same memory, and keeps its rows. Buffers and ``ignored_params`` it receives whole.
"""

from __future__ import annotations

import itertools

import torch
from thunder.core.module import ThunderModule

from ..agreement.control import Control
from ..distributed.process_groups import ProcessGroupRef
from ..options import Options
from .containers import tensors_in_containers
from .devices import resolve_device

__all__ = ["ValueSource"]


class ValueSource:
    """The rank whose values are sharded: this one, or with ``broadcast_from`` the same one for all.

    With ``broadcast_from``, creating it is a collective of ``group``.
    """

    def __init__(self, model: ThunderModule, options: Options, group: ProcessGroupRef, control: Control) -> None:
        named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        registered = list(itertools.chain(*named))
        ids = {id(tensor) for _, tensor in registered}
        attributes = [(path, t) for path, t in tensors_in_containers(model._model) if id(t) not in ids]
        self._attributes = {path for path, _ in attributes}
        self._own = {name: tensor.device.type for name, tensor in (*registered, *attributes)}
        self._theirs = self._own
        self.rank = options.broadcast_from
        if self.rank is not None:
            is_source = control.is_single_rank or group.global_ranks[group.rank] == self.rank
            devices = control.exchange("broadcast_from", self._own if is_source else None)
            self._theirs = next((theirs for theirs in devices if theirs is not None), self._own)

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
                    f"broadcast_from: the module is on the meta device on rank {self.rank} ({name!r}), so there is nothing "
                    f"to broadcast; pass param_init_fn to initialize it"
                )
            if own != theirs and name in self._attributes:
                raise ValueError(
                    f"broadcast_from: attribute {name!r} is a tensor on {own}, and on {theirs} on rank {self.rank}. Only "
                    f"parameters and buffers are broadcast: make it one, register_buffer(..., persistent=False)"
                )
            if own not in (theirs, "meta"):
                raise ValueError(
                    f"broadcast_from: {name!r} is on {own}, but on {theirs} on rank {self.rank}, which broadcasts it: make "
                    f"the module there as on this rank, or here on the meta device"
                )
