"""References to process groups, the ranks that share a bucket, and the end of a process that used gloo.

[Note: Weak references to process groups]
``destroy_process_group`` joins a group's threads only when the last reference to the group is gone. Models, buckets and
traces live until the interpreter shuts down, so they refer to process groups weakly.

[Note: Gloo threads at exit]
A gloo thread that releases the tensors of its last collective needs the interpreter's lock. Once the interpreter is
shutting down, acquiring the lock terminates the thread inside a destructor, and the process aborts (SIGABRT). So at exit
all remaining gloo groups are aborted and destroyed; after an uncaught error, for example, the traceback still refers to
them. Groups that also have another backend are not destroyed, because that could wait for other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..private_api import mesh_over, process_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class ProcessGroupRef:
    """A description of a process group that outlives the group.

    Attributes:
        description: its purpose (``default_pg``, ``mesh_fsdp``), which is the same in every run; its name if it has
            none.
        rank: this process's rank in it.
        global_ranks: the global ranks of its members.
        backends: the backend for each device type, ``"cpu:gloo,cuda:nccl"``, or one name for all types.
        name: its name, the same for all members.
    """

    description: str
    rank: int
    global_ranks: Sequence[int]
    backends: str = "fake"
    name: str = ""
    _process_group: weakref.ref[ProcessGroup] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, group: ProcessGroup) -> ProcessGroupRef:
        """Return the description of ``group``, of which this process is a member."""
        _register_exit_hook()
        description = getattr(group, "group_desc", "")
        return cls(
            description if description and description != "undefined" else group.group_name,
            group.rank(),
            tuple(dist.get_process_group_ranks(group)),
            # Not get_backend(): it says "undefined" if init_process_group() was given none.
            dist.get_backend_config(group),
            group.group_name,
            weakref.ref(group),
        )

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    @property
    def is_fake(self) -> bool:
        """Whether its backend is fake: it sends nothing, and this process compiles as one of many ranks."""
        return self._by_type.get("cpu", self.backends) == "fake"

    @property
    def _by_type(self) -> dict[str, str]:
        pairs = (pair.partition(":") for pair in self.backends.split(","))
        return {device: backend for device, colon, backend in pairs if colon}

    def backend_for(self, device: torch.device) -> str:
        """Return the backend that sends tensors on ``device``, ``"gloo"`` or ``"nccl"``; empty if it has none.

        Tensors on the meta device are not sent. They count as having a backend if all device types share one.
        """
        by_type = self._by_type
        if not by_type:
            return self.backends
        if device.type == "meta":
            return next(iter(by_type.values())) if len(set(by_type.values())) == 1 else ""
        return by_type.get(device.type, "")

    def check_sends(self, device: torch.device, what: str) -> None:
        """Raise an error if the group cannot send tensors on ``device``.

        Args:
            what: a description of the tensors, for the message.

        Raises:
            ValueError: the group has no backend for ``device``.
        """
        if device.type != "meta" and not self.backend_for(device):
            raise ValueError(
                f"{what} would be sent from the {device.type.upper()}, but process group {self.description!r} has backends "
                f"for {self.backends!r} only. Move the module to {' or '.join(self._by_type)} or pass fsdp(device=...), or "
                f"create the process group with a backend for both: init_process_group('cpu:gloo,cuda:nccl')"
            )

    @property
    def is_alive(self) -> bool:
        """Whether the process group still exists."""
        group = self._process_group() if self._process_group is not None else None
        if group is None:
            return False
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):  # torch has destroyed it, but a reference to it still exists
            return False
        return True

    @property
    def process_group(self) -> ProcessGroup:
        """The process group itself.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._process_group() if self._process_group is not None else None
        if group is None:
            raise self.destroyed()
        return group

    def destroyed(self) -> RuntimeError:
        """Return the error that the process group was destroyed."""
        return RuntimeError(
            f"fsdp: process group {self.description!r}, over which parameters are sharded, has been destroyed"
        )


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that share a bucket.

    Attributes:
        group: the ranks that it is sharded over.
        reductions: the same ranks, for reductions: ``group`` itself, or a process group with a separate communicator.
        replicas: the ranks that have the same shards (hybrid sharding); ``None`` if this rank is the only one.
        grid: with replicas, the global ranks of the 2-D mesh: a row for each replica.
        dim_names: the names of the dimensions of the user's mesh; ``None`` without.
    """

    group: ProcessGroupRef
    reductions: ProcessGroupRef
    replicas: ProcessGroupRef | None = None
    grid: Sequence[Sequence[int]] | None = None
    dim_names: tuple[str, ...] | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        group: ProcessGroupRef,
        *,
        reductions: ProcessGroupRef | None = None,
        replicas: ProcessGroupRef | None = None,
        grid: Sequence[Sequence[int]] | None = None,
        dim_names: tuple[str, ...] | None = None,
    ) -> Ranks:
        """Return the ranks; ``reductions`` defaults to ``group``, and ``replicas`` of only this rank count as ``None``."""
        if replicas is not None and replicas.size == 1:
            replicas, grid, dim_names = None, None, dim_names and dim_names[1:]
        return cls(group, reductions or group, replicas, grid, dim_names)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the ranks as a device mesh, 1-D or with the replicas in the first of two dimensions.

        It does not keep the process groups alive; see [Note: Weak references to process groups].
        """
        mesh = self._meshes.get(device_type)
        if mesh is None:
            ranks = list(self.group.global_ranks)
            grid = ranks if self.replicas is None else self.grid
            names = [group.name for group in reversed(self.groups)]
            mesh = self._meshes[device_type] = mesh_over(
                grid, ranks[self.group.rank], names, device_type, self.dim_names
            )
        return mesh

    @property
    def groups(self) -> tuple[ProcessGroupRef, ...]:
        """The groups whose members have shards or replicas of the same parameters."""
        return (self.group,) if self.replicas is None else (self.group, self.replicas)

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The global ranks that have shards or replicas of the same parameters, directly or indirectly."""
        return tuple(self.group.global_ranks if self.grid is None else itertools.chain.from_iterable(self.grid))

    @property
    def averaged(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return self.group.size * (self.replicas.size if self.replicas is not None else 1)


@functools.cache
def _register_exit_hook() -> None:
    """Register the exit hook; later calls do nothing."""
    atexit.register(_destroy_at_exit)


def _destroy_at_exit() -> None:
    for name in ("last_exc", "last_value", "last_traceback"):  # already printed
        sys.__dict__.pop(name, None)
    if dist.is_available() and dist.is_initialized():
        _destroy_groups()
    gc.collect()  # a reference cycle may keep a destroyed group alive


def _destroy_groups() -> None:
    groups = process_groups()
    for group in groups:
        with contextlib.suppress(Exception):
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() == "gloo":
                backend.abort()  # otherwise destruction waits for collectives in flight
    only_gloo = [group for group in groups if _only_gloo(group)]
    is_all = len(only_gloo) == len(groups)
    for group in [None] if is_all else [group for group in only_gloo if group is not dist.group.WORLD]:
        with contextlib.suppress(Exception):  # the process is exiting, nothing can handle an error
            dist.destroy_process_group(group)


def _only_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(Exception):
        return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
    return False
