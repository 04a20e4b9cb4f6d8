"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import thunder_fsdp_sched  # noqa: F401  before thunder
from thunder_fsdp_sched.planning.fake_ranks import fake_rank

import profiles
import pytest
import torch.distributed as dist
from device import IS_CUDA
from ranks import Ranks, worker_pool
from tracing_shortcuts import tracing_shortcuts


def pytest_configure(config: pytest.Config) -> None:
    profiles.LONG = "long" in config.option.markexpr.replace("not long", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if IS_CUDA:
        others = [item for item in items if item.get_closest_marker("device") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    # Thunder's tracing makes millions of long-lived objects. With Python's default thresholds, scanning them repeatedly
    # takes a seventh of the time of compiling.
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 1_000_000, 1_000_000)


@pytest.fixture(autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Collect the garbage of the test alone: what it leaves alive is not looked at again."""
    yield
    gc.collect(1)


@pytest.fixture(scope="session", autouse=True)  # before the fixtures of modules, which compile as well
def _tracing_shortcuts() -> Iterator[None]:
    with tracing_shortcuts():
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Ranks]]:
    """Worker processes in a gloo process group, by their number. Tests share them: starting them takes longer than most."""
    with worker_pool() as of_size:
        yield of_size


@pytest.fixture(scope="session")
def ranks(workers: Callable[[int], Ranks]) -> Ranks:
    return workers(2)


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
