"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks
from tracing_shortcuts import tracing_shortcuts

# --hypothesis-profile=long: twenty times as many random models as usual.
settings.register_profile("long", max_examples=2000)


def pytest_collection_finish() -> None:
    # Thunder's tracing makes millions of long-lived objects. With Python's default thresholds, scanning them repeatedly
    # takes a seventh of the time of compiling.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True)
def _tracing_shortcuts() -> Iterator[None]:
    with tracing_shortcuts():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two worker processes in a gloo process group, shared by all tests: starting them takes longer than most tests."""
    workers = Ranks(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four worker processes in a gloo process group, shared by all tests: starting them takes longer than most tests."""
    workers = Ranks(4)
    yield workers
    workers.close()
