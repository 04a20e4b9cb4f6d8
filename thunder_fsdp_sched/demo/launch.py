"""Start the demo's ranks, and show the results on the first of them."""

from __future__ import annotations

import os
import uuid
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .options import DemoOptions
from .show import Screen
from .text import read_text
from .training import run_fsdp, run_thunder, run_unsharded

__all__ = ["run_demo"]


def run_demo(options: DemoOptions) -> int:
    """Run the demo in ``options.world_size`` new processes on this machine, like ``torchrun``.

    Returns:
        The number of failed checks.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    failures: dict[int, int] = elastic_launch(config, _rank)(options)
    return failures[0]


@record
def _rank(options: DemoOptions) -> int:
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        with Screen(options, shown=dist.get_rank() == 0) as screen:
            text = read_text()
            screen.introduce(text)
            unsharded = None
            if dist.get_rank() == 0:  # the others wait in the first collective of the next run
                unsharded = screen.run(partial(run_unsharded, options, text))
            stock = screen.run(partial(run_thunder, options, text))
            ours = {s: screen.run(partial(run_fsdp, s, options, text)) for s in options.strategies}
        return 0 if unsharded is None else screen.compare(unsharded, stock, ours)
    finally:
        dist.destroy_process_group()
