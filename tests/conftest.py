"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two worker processes in a gloo process group, the same for all tests of a module."""
    workers = Ranks(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four worker processes in a gloo process group, the same for all tests of a module."""
    workers = Ranks(4)
    yield workers
    workers.close()
