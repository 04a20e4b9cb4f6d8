"""Fixtures that several test modules use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks

# --hypothesis-profile=long: twenty times as many random models.
settings.register_profile("long", max_examples=2000)


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
