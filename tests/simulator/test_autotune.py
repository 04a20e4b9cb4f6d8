"""The choice of prefetch and kept buckets by simulated step time, within a memory budget."""

from __future__ import annotations

import dataclasses

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched import testing
from thunder_fsdp_sched.options import parse_bytes
from thunder_fsdp_sched.simulator.clusters import cluster

import pytest
from test_testing import make

# A device that computes slowly enough to hide communication, without launch overhead.
SLOW = dataclasses.replace(
    cluster("h100-sxm"),
    name="slow",
    flops=dict.fromkeys(cluster("h100-sxm").flops, 1e9),
    memory_bandwidth=1e9,
    launch_overhead=0.0,
)


def compiled(blocks: int = 3, **options):
    [traces] = testing.compile_on_fake_ranks(lambda: make(blocks), 8, cluster=SLOW, **options)
    return traces


def slot_bytes(traces) -> int:
    """Return the bytes that the slots of both traces span, which is what is allocated."""
    slots = {b.args[1] for t in (traces.forward, traces.backward) for b in t.bound_symbols if b.sym.name in ISSUES}
    arenas: dict = {}
    for slot in slots:
        arenas[slot.arena] = max(arenas.get(slot.arena, 0), slot.end)
    return sum(arenas.values())


ISSUES = ("fsdp_all_gather", "fsdp_reduce_scatter")


def test_a_budget_keeps_the_buckets_that_fit_and_gathers_the_others_again():
    frugal = compiled(max_unsharded_bytes="1GB", prefetch=1)
    bytes_of_everything = slot_bytes(frugal)
    assert set(frugal.choice.chosen.kept) == {g.bucket for g in testing.gathers(frugal.forward)}
    assert not testing.gathers(frugal.backward)

    tight = compiled(max_unsharded_bytes=bytes_of_everything - 1, prefetch=1)
    assert slot_bytes(tight) <= bytes_of_everything - 1
    kept = set(tight.choice.chosen.kept)
    assert kept
    assert {g.bucket for g in testing.gathers(tight.backward)} == {
        g.bucket for g in testing.gathers(tight.forward)
    } - kept
    assert slot_bytes(tight) == tight.choice.chosen.unsharded_bytes


def test_the_error_of_a_budget_that_is_too_small_says_how_much_is_needed():
    with pytest.raises(
        ValueError, match=r"max_unsharded_bytes: 1,000 bytes are too few: .* need ([\d,]+) bytes"
    ) as error:
        compiled(max_unsharded_bytes=1000, prefetch=1)
    needed = int(str(error.value).split("need ")[1].split(" bytes")[0].replace(",", ""))
    traces = compiled(max_unsharded_bytes=needed, prefetch=1)
    assert slot_bytes(traces) <= needed
    assert traces.choice.chosen.kept == ()


def test_automatic_prefetch_minimizes_the_simulated_step_time():
    traces = compiled(prefetch="auto")
    times = {c.prefetch: c.step_seconds for c in traces.choice.considered}
    assert times[traces.prefetch] <= min(times.values()) * 1.001
    assert times[0] > times[1], "prefetch must reduce the simulated step time"
    testing.assert_prefetch_distance(traces, traces.prefetch)


def test_without_a_cluster_the_local_device_is_used():
    [traces] = testing.compile_on_fake_ranks(lambda: make(2), 8, prefetch="auto")
    assert traces.choice is not None and traces.prefetch == traces.choice.chosen.prefetch


def test_a_budget_is_refused_under_zero2():
    with pytest.raises(ValueError, match=r"max_unsharded_bytes.*zero2"):
        thunder_fsdp_sched.fsdp(sharding_strategy="zero2", max_unsharded_bytes="1GB")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GiB", 40 * 2**30), ("1.5 GB", 1_500_000_000), ("512MB", 512_000_000), ("7", 7), (12, 12), ("3kib", 3072)],
)
def test_byte_counts_may_be_numbers_or_strings(text, nbytes):
    assert parse_bytes("max_unsharded_bytes", text) == nbytes


@pytest.mark.parametrize("wrong", ["many", "-3", "1.5.2GB", 0, True, 1.5])
def test_invalid_byte_counts_are_refused_by_name(wrong):
    with pytest.raises((TypeError, ValueError), match="max_unsharded_bytes"):
        parse_bytes("max_unsharded_bytes", wrong)
