"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("THUNDER_FSDP_SCHED_CHECK_PASSES", "1")  # before the import, and for worker processes, too
os.environ.setdefault("WORLD_SEED", time.strftime("%Y%m%d", time.gmtime()))  # one day for all workers of xdist

import thunder_fsdp_sched  # noqa: F401  before thunder
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank

import profiles
import pytest
import torch
import torch.distributed as dist
from device import IS_CUDA
from known_frames import remember_frames
from ranks import Ranks, worker_pool

# pytest adds handlers to loggers that do not propagate, and with a handler torch prints all traces of each compilation.
logging.getLogger("torch.__trace").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # as on worker ranks: two tests run at a time, and threads of OpenMP spin while they wait
    profiles.LONG = "long" in config.option.markexpr.replace("not long", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if IS_CUDA:
        others = [item for item in items if item.get_closest_marker("device") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """Freeze the objects of imports, which live until the process ends, as ``preloaded`` does for forked processes."""
    remember_frames()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Ranks]]:
    """Worker processes in a gloo process group, by their number. Tests share them: starting them takes longer than most."""
    with worker_pool() as of_size:
        yield of_size


@pytest.fixture(scope="session")
def ranks(workers: Callable[[int], Ranks]) -> Ranks:
    return workers(2)


@pytest.fixture(scope="module")
def lone_workers() -> Iterator[Callable[[int], Ranks]]:
    """Worker processes without a process group, by their number."""
    with worker_pool(has_group=False) as of_size:
        yield of_size


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A fake process group of two ranks, of which this process is the first. Nothing is sent."""
    with fake_rank(0, 2):
        yield
