"""A world on virtual GPUs: its histories without values, whose logs are checked for races and deadlocks.

The unsharded model does not run, and neither does anything that depends on values: leaves, buffers, errors of
operators, files, ``unsharded``, and forks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched import Init

import torch.distributed as dist
import world_run
from random_models import options_of
from torch.distributed.device_mesh import init_device_mesh
from virtual_gpu.world import Rank
from world import Action, World, WorldModel
from world_runner import WorldRunner


class _VirtualRunner(WorldRunner):
    """Runs actions on the sharded model alone."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    close = compare_state = _note_largest = _take_over = _call_unsharded = _nothing


def _needs_values(action: Action) -> bool:
    return (
        action.kind in ("fail_forward", "save", "load", "fork", "disagree")
        or (action.kind == "fail_backward" and action.value >= 0)
        or (action.kind == "add" and action.value % 2 == 1)
    )


def run_histories(rank: Rank, world: World) -> None:
    """Run the histories of a world as one rank, each action in a phase of its own."""
    kinds = ["linear" if block.kind == "scale" else block.kind for block in world.model.blocks]
    blocks = [replace(block, kind=k, leaf=False) for block, k in zip(world.model.blocks, kinds, strict=True)]
    world = replace(world, model=replace(world.model, blocks=tuple(blocks)), norm=False)
    with rank.outside():
        model = WorldModel(world)
    with mock.patch.multiple(world_run, DEVICE=rank.device, WorldModel=lambda world: model):
        options = options_of(world.case, dist.new_group, rank.world_size)
        if not world.alike:
            options["ranks_may_differ"] = True
        if world.replicas:
            with rank.outside():
                options["ranks"] = replace(options["ranks"], mesh=init_device_mesh("cuda", (2, rank.world_size // 2)))
        runner = _VirtualRunner(world, folder=Path(), init=Init(device=rank.device), **options)
        assert runner.unsharded is not None
        with mock.patch.object(runner.unsharded, "backward"):
            for history in world.histories:
                runner.reset()
                for number, action in enumerate(history):
                    if not _needs_values(action):
                        with rank.phase(f"{number}: {action.kind}"):
                            runner.run_action(action)
