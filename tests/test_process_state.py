"""Temporary process-wide changes are undone, also if two threads overlap."""

from __future__ import annotations

import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thunder_fsdp_sched.ir.observation import _quiet
from thunder_fsdp_sched.process_state import Reentrant

import pytest
import torch


def _state() -> Any:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return list(warnings.filters), logger.disabled, set(torch.serialization.get_safe_globals())


@pytest.mark.parametrize(
    "changed", [_quiet, Reentrant(lambda: torch.serialization.safe_globals([Path]))], ids=["warnings", "safe globals"]
)
def test_the_last_to_leave_restores_the_state(changed: Reentrant) -> None:
    before = _state()
    with ThreadPoolExecutor(1) as other:
        changed.__enter__()
        within = _state()
        assert within != before
        other.submit(changed.__enter__).result()
        changed.__exit__()
        assert _state() == within  # the other one is still inside
        other.submit(changed.__exit__).result()
    assert _state() == before
    with changed, changed:
        assert _state() == within
    assert _state() == before
    changed.__enter__()
    changed._reset()  # as in a process that is forked off meanwhile
    assert _state() == before
