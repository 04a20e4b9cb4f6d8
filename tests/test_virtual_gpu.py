"""Compiled models on a virtual GPU: no races, no host waits, the documented numbers of launches, and no wait too many.

Removing any single wait, barrier, event, ``record_stream`` or reference causes a fault, or is proved harmless. Two checkers
must agree: ``clocks`` checks the changed log, and ``order`` compares sets of accesses. For mutations without a fault,
``order`` shows that all accesses to the same bytes are still ordered.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from virtual_gpu import guard, histories, tables
from virtual_gpu.histories import TRANSPORTS
from virtual_gpu.mutations import faults_without, is_ours, site_of
from virtual_gpu.order import Order
from virtual_gpu.world import Result

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def assert_never_synchronizes(result: Result) -> None:
    """Fail if a host waited for its device in a step after the first."""
    __tracebackhide__ = True
    for log in result.logs:
        for entry in log.entries:
            later = entry.phase in ("forward 1", "backward 1", "forward 2", "backward 2")
            assert not (later and (entry.blocks or entry.kind == "sync_event")), str(entry)


_ORDINARY_RUNS = {
    *((transport, "zero3", "fp32") for transport in TRANSPORTS),
    *((transport, "zero2", "bf16") for transport in ("coalesced", "staged", "all_to_all")),
    ("all_to_all", "zero3", "autocast"),
}


@pytest.mark.parametrize(
    ("transport", "strategy", "precision"),
    [pytest.param(*case, marks=[] if case in _ORDINARY_RUNS else pytest.mark.long) for case in tables.COUNTED_CASES],
)
def test_training_has_no_race_no_synchronization_and_the_documented_counts(
    transport: str, strategy: str, precision: str
) -> None:
    result = tables.run_case(transport, strategy, precision)
    result.assert_clean()
    assert_never_synchronizes(result)
    row = tables.count_row(result, transport, strategy, precision)
    assert row == tables.documented()[transport, strategy, precision]


# Transport, setup, and that every nth mutation is checked with both checkers.
CASES = [
    *((transport, "fp32", 20) for transport in TRANSPORTS),
    *(("staged", "offload", 20), ("staged", "interrupted", 20)),
    *(pytest.param(t, s, 1, marks=pytest.mark.long) for t in TRANSPORTS for s in histories.setups_of(t)),
]

NEVER_FLAGGED = {
    # The copy was allocated on the side stream, which waits for the gather before it allocates anything else.
    ("staged", "offload"): {("reference", "shard_source.py:shard < ops.py:all_gather")},
    # torch's operation allocated it on its own stream, which waits for the package's before it allocates anything else.
    ("symmetric_memory", "fp32"): {("reference", "symmetric_memory.py:reduce < base.py:issue_then")},
    ("symmetric_memory", "bf16"): {("reference", "symmetric_memory.py:reduce < base.py:issue_then")},
}
"""Kinds and code locations whose mutations are all redundant, by transport and setup."""


@pytest.mark.parametrize(("transport", "setup", "sample"), CASES)
def test_every_mutation_is_flagged_by_both_checkers_or_redundant(transport: str, setup: str, sample: int) -> None:
    result = histories.run_history(transport, setup)
    result.assert_clean()
    order = Order(result.logs)
    assert order.is_clean
    verdicts = list(order.verdicts(is_ours))
    if setup == "interrupted":  # after an exception it is not known which of the others are still needed
        verdicts = [v for v in verdicts if v.mutation.kind == "record_stream"]
    assert verdicts
    for mutation, verdict in verdicts[::sample]:
        flagged = bool(faults_without(result.logs, mutation))
        assert flagged is (verdict == "flagged"), f"the checkers disagree on {mutation.kind}: {mutation.entry}"
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for mutation, verdict in verdicts:
        found[mutation.kind, site_of(mutation.entry)].add(verdict)
    never_flagged = {place for place, said in found.items() if "flagged" not in said}
    assert never_flagged == NEVER_FLAGGED.get((transport, setup), set())
