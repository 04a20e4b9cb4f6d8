"""Process groups: references to them, the ranks that share a bucket, and cleanup at exit.

[Note: Weak references to process groups]
``destroy_process_group`` joins a group's threads only when the last reference to the group is gone. Models, buckets and
traces live until the interpreter shuts down, so they refer to process groups weakly.

[Note: Gloo threads at exit]
A gloo thread that releases the tensors of its last collective needs the interpreter's lock. Once the interpreter is
shutting down, acquiring the lock terminates the thread inside a destructor, and the process aborts (SIGABRT). So at exit
the gloo groups that this package has used are aborted and destroyed. Other groups are left alone, and so are those with
a second backend, because destroying them could wait for other ranks. The default group cannot be destroyed without the
others, so if some are left alone, it is only aborted. After an uncaught error, frames of torch and of this package in
the traceback still refer to the groups; their local variables are cleared, those of the user's frames are not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import os
import sys
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ..errors import coded_error
from ..private_distributed import host_backend, mesh_over, process_groups
from ..process_state import reset_after_fork

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class PlannedRanks(NamedTuple):
    """The ranks that a fake group represents.

    By default they have torch's default backends, and parameters on the meta device are on GPUs.

    Attributes:
        backends: the backends of their groups, one name for all device types, or ``"cpu:gloo,cuda:nccl"``.
        device_type: the type of device that computes, ``"cpu"`` or ``"cuda"``; empty if the parameters' devices decide.
    """

    backends: str = "cpu:gloo,cuda:nccl,meta:nccl"
    device_type: str = ""


_BY_PARAMETERS = PlannedRanks()

_planned: weakref.WeakKeyDictionary[dist.ProcessGroup, PlannedRanks] = weakref.WeakKeyDictionary()
"""The ranks that ``plan_for`` was given, keyed by the default group."""


def plan_for(planned: PlannedRanks) -> None:
    """Let the fake groups of this process represent groups of these ranks, as long as its default group exists.

    The backend affects what ranks compile: a plan chooses the transport that they choose, and refuses a dtype that they
    cannot send. The device affects what they allocate.
    """
    assert dist.group.WORLD is not None
    _planned[dist.group.WORLD] = planned


def _by_type(backends: str) -> dict[str, str]:
    """Return the backend of each type of device; empty if one name holds for all."""
    pairs = (pair.partition(":") for pair in backends.split(","))
    return {device: backend for device, colon, backend in pairs if colon}


@dataclass(frozen=True, eq=False)
class ProcessGroupRef:
    """A description of a process group that outlives the group."""

    description: str  # its purpose (default_pg, mesh_fsdp), the same in every run; its name if it has none
    rank: int  # of this process
    global_ranks: Sequence[int]
    backends: str = "fake"  # for each device type, "cpu:gloo,cuda:nccl", or one name for all types
    planned: PlannedRanks = _BY_PARAMETERS  # of a fake group: the ranks for which this process compiles
    name: str = ""  # the same for all members
    _process_group: weakref.ref[ProcessGroup] | None = field(default=None, repr=False)
    _process: int = field(default_factory=os.getpid, repr=False)

    @classmethod
    def of(cls, group: ProcessGroup) -> ProcessGroupRef:
        """Return the description of ``group``, of which this process is a member.

        Raises:
            ValueError: its ranks do not ascend, unlike those of groups that are created here with the same ranks.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks != tuple(sorted(ranks)):
            raise coded_error(ValueError, "ranks.unsorted-process-group", ranks=list(ranks))
        _register_exit_hook()
        _used.add(group)
        description = getattr(group, "group_desc", "")
        return cls(
            description if description and description != "undefined" else group.group_name,
            group.rank(),
            ranks,
            # Not get_backend(): it says "undefined" if init_process_group() was given none.
            dist.get_backend_config(group),
            _BY_PARAMETERS if dist.group.WORLD is None else _planned.get(dist.group.WORLD, _BY_PARAMETERS),
            group.group_name,
            weakref.ref(group),
        )

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    @property
    def is_fake(self) -> bool:
        """Whether its backend is fake: it sends nothing, and this process compiles as one of many ranks."""
        return _by_type(self.backends).get("cpu", self.backends) == "fake"

    def backend_for(self, device: torch.device) -> str:
        """Return the backend that sends tensors on ``device``, ``"gloo"`` or ``"nccl"``; empty if it has none.

        A fake group answers for the ranks that it represents. Tensors on the meta device are not sent; their backend is
        the one given for ``meta``, or the one that all device types share.
        """
        backends = self.planned.backends if self.is_fake else self.backends
        by_type = _by_type(backends)
        if not by_type:
            return backends
        if device.type == "meta" and "meta" not in by_type:
            return next(iter(by_type.values())) if len(set(by_type.values())) == 1 else ""
        return by_type.get(device.type, "")

    def device_type_for(self, device: torch.device) -> str:
        """Return the type of device, ``"cpu"`` or ``"cuda"``, that computes with parameters on ``device``.

        A fake group answers for the ranks that it represents.
        """
        if self.is_fake and self.planned.device_type:
            return self.planned.device_type
        return "cuda" if device.type == "meta" else device.type

    def check_sends(self, device: torch.device, what: str) -> None:
        """Raise an error if the group cannot send tensors on ``device``.

        Args:
            what: a description of the tensors, for the message.

        Raises:
            ValueError: the group has no backend for ``device``.
        """
        if device.type != "meta" and not self.backend_for(device):
            raise coded_error(
                ValueError,
                "transport.no-backend-for-device",
                tensors=what,
                device=device.type.upper(),
                group=self.description,
                backends=self.backends,
                devices=" or ".join(_by_type(self.backends)),
            )

    @property
    def is_alive(self) -> bool:
        """Whether the process group still exists, and was not created before this process was forked."""
        group = self._process_group() if self._process_group is not None else None
        if group is None or self._is_of_parent:
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
            RuntimeError: it was destroyed, or this process was forked after it was created.
        """
        group = self._process_group() if self._process_group is not None else None
        if group is None:
            raise coded_error(RuntimeError, "ranks.process-group-destroyed", group=self.description)
        if self._is_of_parent:
            raise coded_error(RuntimeError, "environment.process-group-older-than-fork", group=self.description)
        return group

    @property
    def _is_of_parent(self) -> bool:
        return self._process != os.getpid() and not self.is_fake


class BucketRanks:
    """The ranks that share a bucket."""

    def __init__(
        self,
        group: ProcessGroupRef,
        *,
        reductions: ProcessGroupRef | None = None,
        replicas: ProcessGroupRef | None = None,
        grid: Sequence[Sequence[int]] | None = None,
        dim_names: tuple[str, ...] | None = None,
    ) -> None:
        if replicas is not None and replicas.size == 1:
            replicas, grid, dim_names = None, None, dim_names and dim_names[1:]
        self.group = group  # the ranks that it is sharded over
        self.reductions = reductions or group  # the same ranks, maybe with a separate communicator
        self.replicas = replicas  # the ranks with the same shards (hybrid sharding); None if this rank is the only one
        self.grid = grid  # with replicas, the global ranks of the 2-D mesh: a row for each replica
        self.dim_names = dim_names  # of the user's mesh; None without
        self._meshes: dict[str, DeviceMesh] = {}

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


def default_group() -> ProcessGroupRef:
    """Return the default process group.

    Raises:
        RuntimeError: it is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise coded_error(RuntimeError, "ranks.no-process-group")
    return ProcessGroupRef.of(dist.distributed_c10d._get_default_group())


@functools.cache
def _register_exit_hook() -> None:
    """Register the exit hook; later calls do nothing."""
    atexit.register(_destroy_at_exit)


def _forget_exit_hook() -> None:
    atexit.unregister(_destroy_at_exit)  # inherited groups cannot be destroyed
    _register_exit_hook.cache_clear()


reset_after_fork(_forget_exit_hook)


_used: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The process groups that this package has used."""


def _destroy_at_exit() -> None:
    _clear_library_frames()
    if dist.is_available() and dist.is_initialized():
        _destroy_groups()
    gc.collect()  # a reference cycle may keep a destroyed group alive


def _clear_library_frames() -> None:
    """Clear the local variables of frames of torch and of this package in the traceback of an uncaught error."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith(("torch.", f"{__package__.partition('.')[0]}.")):
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
        error = error.__cause__ or error.__context__


def _destroy_groups() -> None:
    groups = process_groups()
    used = [group for group in groups if group in _used]
    for group in used:
        with contextlib.suppress(Exception):
            backend = host_backend(group)
            if backend.name() == "gloo":
                backend.abort()  # otherwise destruction waits for collectives in flight
    only_gloo = [group for group in used if _only_gloo(group)]
    is_all = len(only_gloo) == len(groups)
    for group in [None] if is_all else [group for group in only_gloo if group is not dist.group.WORLD]:
        with contextlib.suppress(Exception):  # the process is exiting, nothing can handle an error
            dist.destroy_process_group(group)


def _only_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(Exception):
        return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
    return False
