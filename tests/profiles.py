"""What only ``--hypothesis-profile=long`` runs: combinations that add no code path to those of ordinary runs."""

from __future__ import annotations

import pytest
from hypothesis import settings

__all__ = ["LONG", "LONG_ONLY"]

LONG = settings().max_examples > 100

LONG_ONLY = pytest.mark.skipif(not LONG, reason="the whole matrix: --hypothesis-profile=long")
