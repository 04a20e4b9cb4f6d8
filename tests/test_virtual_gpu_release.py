"""``release`` on a virtual GPU: memory is given back after its last use on every stream, and the kernels stay the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from test_virtual_gpu import assert_never_synchronizes
from test_virtual_gpu_matrix import USES, run_on_virtual_gpus
from virtual_gpu import guard
from virtual_gpu.histories import take_three_steps
from virtual_gpu.log import Entry
from virtual_gpu.mutations import faults_without
from virtual_gpu.order import Order
from virtual_gpu.world import Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")

RELEASES = ("step", "bucket")


@pytest.mark.parametrize(
    ("transport", "strategy", "use"),
    [
        ("staged", "zero2", "accumulate"),
        ("all_to_all", "zero3", "raise_exceptions"),
        pytest.param("all_to_all", "zero3", "train", marks=pytest.mark.long),
        pytest.param("flat", "zero3", "use_another_stream", marks=pytest.mark.long),
    ],
)
def test_extensions_have_no_fault(transport: str, strategy: str, use: str) -> None:
    run_on_virtual_gpus(USES[use], transport, {"sharding_strategy": strategy, "extends": True}).assert_clean()


def test_an_extension_exists_in_backward_only() -> None:
    never, result = three_steps("never"), three_steps("never", extends=True)
    kept, *extensions = lifetimes(result)
    assert kept[0].phase == "forward 0" and kept[1] is None
    assert [(a.phase, f.phase) for a, f in extensions if f is not None] == [(f"backward {n}",) * 2 for n in range(3)]
    assert work(result, "kernel", "copy", "collective") == work(never, "kernel", "copy", "collective")


def three_steps(release: str, transport: str = "all_to_all", **options: Any) -> Result:
    result = run(take_three_steps, "fp32", ranks=[0], release=release, transport=transport, **options)
    result.assert_clean()
    assert_never_synchronizes(result)
    return result


def lifetimes(result: Result) -> list[tuple[Entry, Entry | None]]:
    """Return the entries that allocate and free the memory of each arena, in the order of the log."""
    [log] = result.logs
    freed = {e.storage: e for e in log.entries if e.kind == "free"}
    return [
        (entry, freed.get(entry.storage))
        for entry in log.entries
        if entry.kind == "alloc" and any(file.endswith("runtime/memory.py") for file, _, _ in entry.where)
    ]


def work(result: Result, *kinds: str) -> list[tuple[str, str, int]]:
    """Return what the last step runs, in the order of the log, with a number for each stream."""
    entries = [e for e in result.logs[0].entries if e.phase.endswith(" 2") and e.kind in kinds]
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(e.stream for e in entries))}
    return [(e.kind, e.name, numbers[e.stream]) for e in entries]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_step_takes_its_memory_again_and_runs_the_same_kernels(strategy: str) -> None:
    never, step, bucket = (three_steps(r, sharding_strategy=strategy) for r in ("never", *RELEASES))
    assert {alloc.phase for alloc, freed in lifetimes(never) if freed is None} == {"forward 0"}
    for result in (step, bucket):
        for alloc, freed in lifetimes(result):
            assert freed is not None and alloc.stream == freed.stream
            assert alloc.phase.split()[1] == freed.phase.split()[1], "it is kept from step to step"
        taken = [[alloc for alloc, _ in lifetimes(result) if alloc.phase.endswith(str(n))] for n in range(3)]
        assert len(taken[0]) == len(taken[1]) == len(taken[2]) > 0
    assert work(step, "kernel", "copy", "collective") == work(never, "kernel", "copy", "collective")
    # No bucket is resident from forward to backward, so there are more collectives.
    assert work(bucket, "kernel", "copy") == work(never, "kernel", "copy")


@pytest.mark.parametrize(
    ("release", "transport"),
    [
        ("step", "all_to_all"),
        ("bucket", "staged"),
        pytest.param("step", "staged", marks=pytest.mark.long),
        pytest.param("bucket", "all_to_all", marks=pytest.mark.long),
    ],
)
def test_memory_is_given_back_only_after_the_wait_for_its_last_use(release: str, transport: str) -> None:
    result = three_steps(release, transport)
    order = Order(result.logs)
    of_backward = [v for v in order.verdicts(lambda e: e.phase == "backward 1") if v.mutation.kind == "wait"]
    flagged = [mutation for mutation, verdict in of_backward if verdict == "flagged"]
    faults = [faults_without(result.logs, mutation) for mutation in flagged]
    assert all(faults), "the checkers disagree"
    reused = [f for f in itertools.chain(*faults) if f.kind == "reuse" and "(uint8[" in f.text]
    assert reused, "no wait orders the last use of an arena before the next allocation"
