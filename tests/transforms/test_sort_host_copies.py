"""Where copies of offloaded activations are issued and waited for, and the memory that this frees."""

from __future__ import annotations

from functools import cache

from thunder_fsdp_sched.extras import testing
from thunder_fsdp_sched.extras.activation_offload.host_copies import (
    fsdp_copy_to_device,
    fsdp_copy_to_host,
    fsdp_wait_device_copy,
    fsdp_wait_host_copy,
)
from thunder_fsdp_sched.extras.activation_offload.sort_host_copies import (
    MAX_HOST_COPIES_IN_FLIGHT,
    CopyTimes,
    sort_host_copies,
)

import pytest
from internals import args_of, declared, nbytes_of, outs_of, statements
from models import Stack, compile_model
from offloading import offloading
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


@cache
def _compiled(offloads: bool = True) -> testing.CompiledTraces:
    with offloading(lambda found: found if offloads else ()):
        return compile_model(lambda: Stack(4).double())


def _sort(trace: TraceCtx, copy: float) -> list[BoundSymbol]:
    """Return a trace in which each copy takes as long as ``copy`` other bound symbols."""
    times = CopyTimes(lambda t: [1.0] * len(t.bound_symbols), lambda nbytes: copy)
    sorted_trace = sort_host_copies(trace, times=times)
    assert [b for b in sorted_trace.bound_symbols if not declared(b).copies_activation] == [
        b for b in statements(trace) if not declared(b).copies_activation
    ]
    return sorted_trace.bound_symbols


def _spans(bsyms: list[BoundSymbol]) -> list[tuple[int, int, int]]:
    """Return the positions of issue and wait of each copy, and its bytes."""
    issued = {b.output.name: i for i, b in enumerate(bsyms) if b.sym in (fsdp_copy_to_host, fsdp_copy_to_device)}
    waits = (fsdp_wait_host_copy, fsdp_wait_device_copy)
    found = [(issued[b.args[0].name], i, nbytes_of(b.output)) for i, b in enumerate(bsyms) if b.sym in waits]
    assert len(found) == len(issued) > 5
    return found


def _assert_within_limit(bsyms: list[BoundSymbol]) -> int:
    """Check the bytes in flight, and return the most copies that are in flight at once."""
    spans = _spans(bsyms)
    limit = sum(sorted(nbytes for _, _, nbytes in spans)[-MAX_HOST_COPIES_IN_FLIGHT:])
    in_flight = [[nbytes for issue, wait, nbytes in spans if issue <= at < wait] for at in range(len(bsyms))]
    assert all(sum(nbytes) <= limit for nbytes in in_flight)
    return max(map(len, in_flight))


@pytest.mark.parametrize("copy", [0.0, 3.0, 1000.0])
def test_a_copy_to_the_host_starts_after_the_last_use_and_ends_when_it_has_probably_finished(copy: float) -> None:
    bsyms = _sort(_compiled().forward_before, copy)
    most = _assert_within_limit(bsyms)
    for issue, wait, _ in _spans(bsyms):
        source = bsyms[issue].args[0].name
        before = next(i for i in range(issue - 1, -1, -1) if not declared(bsyms[i]).copies_activation)
        assert source in args_of(bsyms[before]) or source in outs_of(bsyms[before])
        assert not any(source in args_of(b) for b in bsyms[wait + 1 :])
        between = sum(not declared(b).copies_activation for b in bsyms[issue:wait])
        reason = str(bsyms[wait].header)
        assert (reason == "finished by now") is (between >= 1.25 * copy and copy < 1000) or "end of forward" in reason
    assert most == 1 if copy == 0 else most > 1
    reasons = {str(bsyms[wait].header).partition(":")[0] for _, wait, _ in _spans(bsyms)}
    assert ("in-flight limit" in reasons) is (copy == 1000)


@pytest.mark.parametrize("copy", [0.0, 3.0, 1000.0])
def test_a_copy_to_the_device_starts_as_late_as_it_is_hidden_and_ends_before_its_first_consumer(copy: float) -> None:
    bsyms = _sort(_compiled().backward_before, copy)
    most = _assert_within_limit(bsyms)
    spans = _spans(bsyms)
    assert spans == sorted(spans), "issues and waits have the order of first consumers"
    for issue, wait, _ in spans:
        consumer = next(b for b in bsyms[wait:] if not declared(b).copies_activation)
        assert bsyms[wait].output.name in args_of(consumer)
        between = sum(not declared(b).copies_activation for b in bsyms[issue:wait])
        assert between == 0 if copy == 0 else between >= 3 or "from the start" in str(bsyms[issue].header)
    assert (most > 1) is (copy == 1000)
