"""Traces, schedules, slots, predicted bytes and plan numbers stay what they are; see ``freeze``."""

from __future__ import annotations

import json

import pytest
from freeze import DIGESTS, FROZEN, digest, dump, versions
from profiles import with_long

KNOWN = json.loads(DIGESTS.read_text())


@pytest.mark.skipif(
    KNOWN["versions"] != versions(), reason="the digests are those of other versions of torch and Thunder"
)
@pytest.mark.parametrize("name", with_long(FROZEN, "model_views_of_parameters_zero2"))
def test_dump_is_unchanged(name: str) -> None:
    """If the change is meant, compare dumps of ``freeze.py write`` before and after, then run ``make freeze``."""
    assert digest(dump(FROZEN[name])) == KNOWN[name]
