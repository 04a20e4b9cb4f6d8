"""``CommPolicy``: exempt parameters, decisions by module, and what plans, traces and other ranks see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import CommPolicy, fsdp

import models
import pytest
import torch
from coded import coded
from models import FrozenParameters, Stack, TiedWeights, TinyParameters
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

P = CommPolicy


def compile_model(make: Callable[[], nn.Module], **options: Any) -> Any:
    return models.compile_model(lambda: make().double(), **options)


def _formats(compiled: Any) -> dict[str, tuple[str | None, str | None]]:
    return {bucket.spec.name: bucket.spec.options.formats for bucket in compiled.buckets}


def test_exempt_parameters_have_segments_of_their_own_and_buckets_of_them_are_exact() -> None:
    policy = P(gather="int8", reduce="bfloat16", exempt=("blocks.1", "*.up.weight"))
    compiled = compile_model(lambda: Stack(3), comm_policy=policy)
    apart = {"blocks.1": (None, None)}
    assert _formats(compiled) == {
        **dict.fromkeys(("first", "blocks.0", "blocks.2", "last"), ("int8", "bfloat16")),
        **apart,
    }
    encoded = set()
    for spec in (bucket.spec for bucket in compiled.buckets if bucket.spec.gather_wire is not None):
        for param, placement in zip(spec.params, spec.layout.placements, strict=True):
            segment = [s for s in spec.layout.segments if s.unsharded_offset <= placement.unsharded_offset][-1]
            encoded.update(() if segment.exempt else (param.name,))
    assert encoded == {"first.weight", "blocks.0.down.weight", "blocks.2.down.weight", "last.weight"}
    every = compile_model(TinyParameters, comm_policy=P(gather="int8", min_ndim=0))
    assert not any(s.exempt for b in every.buckets for s in b.spec.layout.segments)


def test_values_of_two_bytes_are_not_gathered_as_bfloat16_and_integers_never_encoded() -> None:
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    policy = P(gather="bfloat16", reduce="bfloat16")
    formats = _formats(compile_model(lambda: Stack(1), comm_policy=policy, mp_policy=low))
    assert set(formats.values()) == {(None, "bfloat16")}
    counting = compile_model(_Counting, comm_policy=P(gather="int8", reduce="int8"))
    assert set(_formats(counting).values()) == {(None, None), ("int8", "int8")}


class _Counting(Stack):
    def __init__(self) -> None:
        super().__init__(1)
        self.counts = nn.Parameter(torch.ones(4, 3, dtype=torch.int64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.counts.sum()


def test_functions_decide_by_module_and_tied_parameters_alike() -> None:
    def decide(name: str, module: nn.Module) -> CommPolicy | None:
        known = {"": P(reduce="int8"), "blocks.1": P(gather="bfloat16"), "blocks.2.up": CommPolicy()}
        return known.get(name)

    compiled = compile_model(lambda: Stack(3), comm_policy=decide)
    assert _formats(compiled) == {
        "first": (None, "int8"),
        "blocks.0": (None, "int8"),
        "blocks.1": ("bfloat16", None),
        "blocks.2": (None, None),
        "blocks.2.sent_as_exact_int8": (None, "int8"),
        "last": (None, "int8"),
    }
    refusal = coded("option.tied-parameter-decided-twice", "comm_policy", "embedding.weight", "head.weight")
    with pytest.raises(ValueError, check=refusal):
        compile_model(TiedWeights, comm_policy=lambda name, module: P(gather="int8") if name == "head" else None)
    tied = compile_model(TiedWeights, comm_policy=P(gather="int8", exempt=("head",)))
    assert _formats(tied)["embedding"] == (None, None), "it is exempt by one of its names"


@pytest.mark.parametrize("make", [lambda: Stack(2), FrozenParameters])
def test_a_policy_without_formats_changes_nothing(make: Any) -> None:
    without, off = (compile_model(make, comm_policy=policy) for policy in (None, P(block=64, min_ndim=0)))
    programs = [[str(trace).partition("\n")[2] for trace in compiled.traces] for compiled in (without, off)]
    assert programs[0] == programs[1]
    assert without.schedule == off.schedule and without.memory == off.memory
    assert [b.spec.layout for b in without.buckets] == [b.spec.layout for b in off.buckets]
    assert [type(b.transport) for b in without.buckets] == [type(b.transport) for b in off.buckets]


def test_ranks_compare_each_part_of_a_policy() -> None:
    def lines(**part: Any) -> list[str]:
        return [*fsdp(comm_policy=P(**{"gather": "int8", "reduce": "int8", **part})).options.lines("fsdp")]

    others = {"gather": "bfloat16"}, {"reduce": "bfloat16"}, {"block": 64}, {"exempt": ("last",)}, {"min_ndim": 1}
    assert all(lines(**other) != lines() for other in (*others, {"error_feedback": True}))
