"""Temporary process-wide changes are undone, also if two threads overlap."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.planning import compile_as_rank
from thunder_fsdp_sched.process_state import Reentrant

import torch
from models import Stack


def _state() -> Any:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return list(warnings.filters), logger.disabled, set(torch.serialization.get_safe_globals())


@contextlib.contextmanager
def _changed_state() -> Iterator[None]:
    with warnings.catch_warnings(), torch.serialization.safe_globals([Path]):
        warnings.simplefilter("ignore")
        yield


def test_the_last_to_leave_restores_the_state() -> None:
    changed = Reentrant(_changed_state)
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


def test_a_compilation_leaves_the_state_as_it_was() -> None:
    before = _state()
    compile_as_rank(lambda: (Stack(1), (torch.ones(2, 4),)), fsdp(), rank=0, world_size=2)
    assert _state() == before
