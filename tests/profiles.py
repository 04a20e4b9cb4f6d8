"""Marks for combinations that add no code path, so that only ``--hypothesis-profile=long`` runs them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from models import CASES

__all__ = ["LONG", "LONG_ONLY", "each_case", "mostly_zero3"]

LONG = settings().max_examples > 100

LONG_ONLY = pytest.mark.skipif(not LONG, reason="the whole matrix: --hypothesis-profile=long")

mostly_zero3 = pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=LONG_ONLY), "zero3"])
"""Test with ZeRO-3; the long profile tests with ZeRO-2 as well."""

_ORDINARY_CASES = (
    "tied_weights",
    "buffers",
    "shared_blocks",
    "derived_parameters",
    "checkpointed",
    "views_of_parameters",
)


def each_case(*more: str) -> list[Any]:
    """Return the names of ``models.CASES``, some of them for the long profile only, and ``more``.

    It is for tests that compare two ways to compile a model. ``test_training`` trains all models in ordinary runs.
    """
    return [*(pytest.param(n, marks=[] if n in _ORDINARY_CASES else [LONG_ONLY]) for n in CASES), *more]
