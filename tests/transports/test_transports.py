"""Transports: all give the same training results, and invalid choices are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.transports import choose_transport, find_transport

import pytest
import shared_memory
import thunder
import torch
import torch.distributed as dist
from coded import coded
from device import SHARED_MEMORY
from internals import BucketRanks, ProcessGroupRef
from models import Stack, TinyParameters, UnevenRows
from ranks import on_ranks
from recorded import Recorded
from scenario import Run, Scenario, do, each
from torch.distributed.fsdp import MixedPrecisionPolicy

#
# Training
#


def _check_transports(run: Run) -> None:
    ops = run.transform.compiled[-1].schedule
    used = {op.transport for schedule in (ops.forward, ops.backward) for op in schedule}
    assert used == {bucket.comm.transport for bucket in run.transform.plan} == {"coalesced"}


def _with_shared_memory(**options: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        shared_memory.register()
        return {"transport": "coalesced", **options}

    return make


def _own(bucket: str, params: Any) -> str:
    return {"first": "all_reduce", "blocks.0": "coalesced", "blocks.1": "all_to_all", "last": "flat"}[bucket]


def _check_own_transports(run: Run) -> None:
    assert all(bucket.comm.transport == _own(bucket.name, None) for bucket in run.transform.plan)


ACCUMULATE = [do.micro_batch(5), do.micro_batch(6, no_sync=False), do.step()]
SCENARIOS = {
    "zero3": Scenario(
        lambda: UnevenRows().double(),
        [do.train(2), _check_transports],
        _with_shared_memory(),
        others=[{"transport": t} for t in ("flat", "all_to_all", "all_reduce", SHARED_MEMORY)],
    ),
    "zero2, 4 ranks": Scenario(
        lambda: TinyParameters().double(),  # some ranks have no rows
        [do.train(2), _check_transports],
        _with_shared_memory(sharding_strategy="zero2"),
        others=[{"transport": t} for t in ("flat", "all_to_all", SHARED_MEMORY)],
        others_tolerance=1e-5,  # more than two ranks add up in an order that depends on the offset
        ranks=4,
    ),
    "each bucket its own": Scenario(
        lambda: Stack(2).double(), [_check_own_transports, do.train(2), *ACCUMULATE], {"transport": _own}
    ),
}


@each(SCENARIOS)
def test_training_is_the_same_with_every_transport(name: str) -> None:
    SCENARIOS[name].run()


@on_ranks(2)
def test_gloo_gathers_no_parameters_in_one_call() -> None:
    """Two coalesced all-gathers in flight would corrupt the heap, sooner or later."""
    run = Run(Stack(1).double(), transport="coalesced")
    with Recorded() as reads:
        run.forward(0)
    gathers = [name for name in reads.collectives if "gather" in name]
    assert gathers and not any("coalesced" in name for name in gathers), gathers


#
# Invalid choices
#


@on_ranks(2)
def test_symmetric_memory_compares_gpus_by_their_ids(rank: int) -> None:
    """Each process sees one GPU, as ``cuda:0``."""
    transport, device = find_transport("symmetric_memory"), torch.device("cuda", 0)

    def check(uuid: str, host: str = "one") -> None:
        ranks = BucketRanks(ProcessGroupRef.of(dist.new_group([0, 1])))
        properties = SimpleNamespace(uuid=uuid)
        with (
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
            mock.patch.object(socket, "gethostname", lambda: host),
        ):
            transport.check(device, [torch.float32], ranks)

    with mock.patch.dict(os.environ):
        os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
        with pytest.raises(ValueError, check=coded("transport.ranks-share-gpu", "[0, 1]")):
            check("GPU-0")
        with pytest.raises(ValueError, check=coded("transport.ranks-on-several-hosts", "host0, host1")):
            check(f"GPU-{rank}", f"host{rank}")
        check(f"GPU-{rank}")
        assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"transport": "symmetric_memory"}, ("transport='symmetric_memory'", "'cpu'", "'flat'")),
        ({"mp_policy": MixedPrecisionPolicy(torch.float8_e4m3fn)}, ("gloo", "torch.float8_e4m3fn", "mp_policy")),
    ],
)
@on_ranks(2)
def test_a_transport_that_cannot_send_a_bucket_is_refused_by_jit(options: dict[str, Any], names: Any) -> None:
    with pytest.raises(ValueError, check=coded("transport.refused-for-bucket", "'first'", *names)):
        thunder.jit(Stack(1), transforms=[fsdp(**options)])


def test_auto_chooses_flat_unless_it_needs_several_collectives():
    assert choose_transport([(64, 32), (32,)], 2, 4, "nccl") == ("flat", "auto, one collective and no copy")
    # Rows of 1,009 and of 1,013 elements rarely end at a common offset, so each width needs a collective of its own.
    transport, reason = choose_transport([(64, 1009), (64, 1013)], 64, 4, "nccl")
    assert transport == "coalesced" and "2 collectives" in reason
    transport, reason = choose_transport([(64, 1009), (64, 1013)], 64, 4, "gloo")
    assert transport == "all_to_all" and "sends them twice" in reason
