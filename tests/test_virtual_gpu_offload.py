"""Offloaded activations on a virtual GPU: their copies overlap and have no races, and each wait and reference is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

from thunder_fsdp_sched.runtime.activation_offload import HostCopy

import pytest
import torch
from offloading import offloading
from test_virtual_gpu import assert_never_synchronizes
from virtual_gpu import guard
from virtual_gpu.histories import faults_after_interruption, interrupt, make_model, take_three_steps
from virtual_gpu.log import Entry
from virtual_gpu.mutations import faults_without, site_of
from virtual_gpu.order import Order
from virtual_gpu.world import Rank, Result, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def _is_copy(entry: Entry) -> bool:
    return "activation_offload.py" in site_of(entry)


def _steps(rank: Rank) -> None:
    with offloading():
        take_three_steps(rank, "fp32", cluster="h100-sxm")


def _interleave(rank: Rank) -> None:
    """Drop a backward, run two forwards before their backwards and one backward twice, on another stream than forward."""
    with offloading():
        model = make_model(rank, cluster="h100-sxm")

        def forward() -> torch.Tensor:
            return model(torch.randn(4, 8, device=rank.device)).sum()

        for step in range(3):
            dropped = forward() if step == 1 else None
            first, second = forward(), forward()
            del dropped
            side = torch.cuda.Stream(rank.device)
            side.wait_stream(torch.cuda.current_stream(rank.device))
            with torch.cuda.stream(side):
                first.backward(retain_graph=True)
                second.backward()
            torch.cuda.current_stream(rank.device).wait_stream(side)
            first.backward()


def _read_by_hooks(rank: Rank) -> None:
    """Let hooks read on the host what forward has copied there."""

    def pack(saved: torch.Tensor) -> torch.Tensor:
        return saved.clone() if saved.device.type == "cpu" else saved

    with offloading():
        model = make_model(rank, cluster="h100-sxm")
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
                loss = model(torch.randn(4, 8, device=rank.device)).sum()
            loss.backward()


def _interrupt(rank: Rank) -> None:
    with offloading():
        for at in (1, 3, 8, 10):
            interrupt(rank, at, (HostCopy, "wait"), cluster="h100-sxm")


@cache
def _three_steps() -> Result:
    return run(_steps, ranks=[0])


def test_copies_run_on_a_stream_of_each_direction_and_never_synchronize() -> None:
    result = _three_steps()
    result.assert_clean()
    assert_never_synchronizes(result)
    copies = [e for e in result.logs[0].entries if e.kind == "copy" and _is_copy(e)]
    assert not any(e.blocks for e in copies)
    compute = {e.stream for e in result.logs[0].entries if e.kind == "kernel"}
    per_stream = Counter((e.stream, e.phase.split()[0]) for e in copies)
    assert len(per_stream) == 2 and not compute & {stream for stream, _ in per_stream}
    assert len(set(per_stream.values())) == 1, "everything that is copied to the host is copied back"


@pytest.mark.parametrize("history", [_interleave, _read_by_hooks])
def test_unusual_uses_have_no_race(history: Callable[[Rank], None]) -> None:
    run(history, ranks=[0]).assert_clean()


def test_memory_of_interrupted_copies_is_not_reused_too_early() -> None:
    assert not faults_after_interruption(run(_interrupt, ranks=[0]))


def test_every_wait_and_reference_of_a_copy_is_needed_or_redundant() -> None:
    result = _three_steps()
    order = Order(result.logs)
    verdicts = [
        v
        for v in order.verdicts(lambda e: bool(e.phase))
        if _is_copy(v.mutation.entry) or v.mutation.kind == "reference"
    ]
    for mutation, verdict in verdicts[::5]:
        assert bool(faults_without(result.logs, mutation)) is (verdict == "flagged"), mutation
    needed = {(mutation.kind, site_of(mutation.entry)) for mutation, verdict in verdicts if verdict == "flagged"}
    assert needed == {
        ("reference", ""),  # the value that is copied
        *(
            (kind, f"activation_offload.py:_issue < activation_offload.py:copy_to_{where}")
            for kind in ("event", "wait")
            for where in ("host", "device")
        ),
        ("wait", "activation_offload.py:wait < activation_offload.py:wait_host_copy"),
        ("wait", "activation_offload.py:wait < activation_offload.py:wait_device_copy"),
    }
