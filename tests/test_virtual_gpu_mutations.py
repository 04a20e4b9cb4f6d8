"""Removing any single wait, barrier, event, ``record_stream`` or reference causes a fault, or is proved harmless.

Two checkers must agree: ``clocks`` checks the changed log, and ``order`` compares sets of accesses. For mutations without a
fault, ``order`` shows that all accesses to the same bytes are still ordered.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from virtual_gpu import guard, histories, tables
from virtual_gpu.mutations import faults_without, site_of
from virtual_gpu.order import Order, Verdict

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

# Transport, setup, and that every nth mutation is checked with both checkers.
CASES = [
    *((transport, "fp32", 20) for transport in histories.TRANSPORTS),
    *(("staged", "offload", 20), ("staged", "interrupted", 20)),
    *(pytest.param(t, s, 1, marks=pytest.mark.long) for t in histories.TRANSPORTS for s in histories.setups_of(t)),
]

NEVER_FLAGGED = {
    # The copy was allocated on the side stream, which waits for the gather before it allocates anything else.
    ("staged", "offload"): {("reference", "shard_source.py:shard < bucket.py:shard_to_send")},
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
    verdicts = tables.verdicts_of(setup, order)
    assert verdicts
    for mutation, verdict in verdicts[::sample]:
        flagged = bool(faults_without(result.logs, mutation))
        assert flagged is (verdict == "flagged"), f"the checkers disagree on {mutation.kind}: {mutation.entry}"
    assert never_flagged(verdicts) == NEVER_FLAGGED.get((transport, setup), set())
    documented = tables.documented("mutations")
    assert tables.mutation_row(transport, setup, verdicts) == documented[transport, setup]


def never_flagged(verdicts: list[Verdict]) -> set[tuple[str, str]]:
    """Return the kinds and code locations of which no mutation is flagged."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for mutation, verdict in verdicts:
        found[mutation.kind, site_of(mutation.entry)].add(verdict)
    return {place for place, said in found.items() if "flagged" not in said}
