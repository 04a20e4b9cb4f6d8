"""Compiled models on a virtual GPU: no races, no host waits, and the numbers of launches in the documentation."""

from __future__ import annotations

from functools import partial

import pytest
from virtual_gpu import guard, tables
from virtual_gpu.histories import TRANSPORTS, take_three_steps
from virtual_gpu.world import Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

train = partial(take_three_steps, precision="fp32")


def assert_never_synchronizes(result: Result) -> None:
    """Fail if a host waited for its device in a step after the first."""
    __tracebackhide__ = True
    for log in result.logs:
        for entry in log.entries:
            later = entry.phase in ("forward 1", "backward 1", "forward 2", "backward 2")
            assert not (later and (entry.blocks or entry.kind == "sync_event")), str(entry)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_has_no_race_and_no_synchronization(transport: str) -> None:
    result = run(train, transport=transport, ranks=None if transport in ("flat", "symmetric_memory") else [0])
    result.assert_clean()
    assert_never_synchronizes(result)


@pytest.mark.parametrize(
    "transport",
    ["staged", "symmetric_memory", *(pytest.param(t, marks=pytest.mark.long) for t in ("flat", "all_to_all"))],
)
def test_training_has_no_race_if_another_device_is_current(transport: str) -> None:
    ranks = None if transport == "symmetric_memory" else [1]  # rank 0 has the current device
    run(train, transport=transport, ranks=ranks, set_device=False).assert_clean()


_ORDINARY_RUNS = {
    *((transport, "zero3", "fp32") for transport in TRANSPORTS),
    *((transport, "zero2", "bf16") for transport in ("coalesced", "staged", "all_to_all")),
    ("all_to_all", "zero3", "autocast"),
}


@pytest.mark.parametrize(
    ("transport", "strategy", "precision"),
    [pytest.param(*case, marks=[] if case in _ORDINARY_RUNS else pytest.mark.long) for case in tables.COUNTED_CASES],
)
def test_counts_of_launches_copies_events_and_waits_match_the_documentation(
    transport: str, strategy: str, precision: str
) -> None:
    row = tables.count_row(transport, strategy, precision)
    assert row == tables.documented("counters")[transport, strategy, precision]
