"""Fixtures that several test modules use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks
from tracing_shortcuts import tracing_shortcuts

# --hypothesis-profile=long: twenty times as many random models.
settings.register_profile("long", max_examples=2000)


def pytest_collection_finish() -> None:
    # Thunder's tracing makes millions of objects that live on: with Python's own thresholds a seventh of the time of
    # compiling goes to looking through them again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.fixture(autouse=True)
def _tracing_shortcuts() -> Iterator[None]:
    with tracing_shortcuts():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two worker processes in a gloo process group, the same for all tests: starting them takes longer than most."""
    workers = Ranks(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four worker processes in a gloo process group, the same for all tests: starting them takes longer than most."""
    workers = Ranks(4)
    yield workers
    workers.close()
