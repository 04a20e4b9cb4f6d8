"""Traces, schedules, slots, predicted bytes and plan numbers stay what they are; see ``freeze``."""

from __future__ import annotations

import json

import pytest
from freeze import CASES, DIGESTS, digest, dump, versions

KNOWN = json.loads(DIGESTS.read_text())


@pytest.mark.skipif(
    KNOWN["versions"] != versions(), reason="the digests are those of other versions of torch and Thunder"
)
@pytest.mark.parametrize("name", CASES)
def test_dump_is_unchanged(name: str) -> None:
    """If the change is meant, compare texts of ``freeze.py FOLDER`` from before and after it, then run ``freeze.py``."""
    assert digest(dump(CASES[name])) == KNOWN[name]
