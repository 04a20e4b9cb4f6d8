"""Passes can be left out by name, unless numbers depend on them, and each can be checked and dumped."""

from __future__ import annotations

import os
from typing import Any

from thunder_fsdp_sched import Debug, Sharding, VerificationError, fsdp

import pytest
from coded import coded
from internals import pipeline
from models import CASES, Stack, compile_model
from passes_table import rows_of
from pipeline_patches import replacing
from scenario import Scenario, do, each

OPTIONAL = pipeline.OPTIONAL


def _stack() -> Stack:
    return Stack(3, width=16).double()


def _without(*names: str, strategy: str = "zero3", long: bool = False, **options: Any) -> Scenario:
    sharding = Sharding(strategy, **options)
    return Scenario(
        lambda: CASES["checkpointed"]().double(),
        [do.train(1), do.micro_batch(0), do.micro_batch(1, no_sync=False), do.step()],
        {"sharding_strategy": sharding, "debug": Debug(skip_passes=names)},
        others=[{"sharding_strategy": sharding}],
        long=long,
    )


SCENARIOS = {
    "ZeRO-3": _without(*OPTIONAL, secondary_ranks=2),
    "ZeRO-2": _without(*OPTIONAL, strategy="zero2", release=True, long=True),
    "reuse": _without("reuse_from_forward"),
}


@each(SCENARIOS)
def test_a_step_without_passes_that_are_not_required_gives_the_same_bits(name: str) -> None:
    SCENARIOS[name].run()


def test_passes_that_are_left_out_leave_no_trace() -> None:
    whole, without = (compile_model(_stack, debug=Debug(skip_passes=names)) for names in ((), OPTIONAL))
    assert "fsdp_matmul_into" in str(whole.backward) and "fsdp_matmul_into" not in str(without.backward)
    assert set(whole.pass_seconds) - set(without.pass_seconds) == set(whole.pass_seconds) & set(OPTIONAL)
    assert set(OPTIONAL) <= {row.pass_.__name__ for phase in pipeline.PHASES for row in rows_of(phase)}


@pytest.mark.parametrize("name", ["verify", "sort_comunication"])
def test_a_required_or_unknown_pass_cannot_be_left_out(name: str) -> None:
    with pytest.raises(ValueError, check=coded("option.pass-cannot-be-skipped", name)):
        fsdp(debug=Debug(skip_passes=(name,)))


def _faulty(trace: Any, context: Any) -> Any:
    """Return the trace with its third statement in the first place, which then reads what is not defined."""
    third = next(b for b in trace.bound_symbols if b.sym.name == "fsdp_wait_params")
    trace.bound_symbols = [third, *(b for b in trace.bound_symbols if b is not third)]
    return trace


def test_the_check_names_the_pass_after_which_a_trace_is_wrong() -> None:
    assert os.environ["THUNDER_FSDP_SCHED_CHECK_PASSES"] == "1" and Debug().check_passes
    with replacing("write_grads_in_place", _faulty):
        with pytest.raises(
            VerificationError,
            check=coded("proof.ill-formed-trace", "write_grads_in_place", "bound symbol 0", "which is not defined"),
        ):
            compile_model(_stack)
        with pytest.raises(Exception, match=r"^(?!after write_grads_in_place)"):
            compile_model(_stack, debug=Debug(check_passes=False))
