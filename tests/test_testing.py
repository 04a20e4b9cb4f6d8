"""The assertions and the snapshot fixture that users' tests can use: a real model, any world size, no processes."""

from pathlib import Path

from thunder_fsdp_sched import testing

import pytest
import torch
from coded import coded
from models import Calling, Stack
from torch import nn

pytest_plugins = ["pytester"]


def make(blocks: int = 4):
    torch.manual_seed(0)
    return Stack(blocks, width=16), (torch.randn(2, 16),)


@pytest.mark.parametrize(
    ("strategy", "prefetch"), [("zero3", 1), ("zero2", 1), pytest.param("zero3", 2, marks=pytest.mark.long)]
)
def test_a_real_model_passes_all_assertions_on_64_fake_ranks(strategy, prefetch):
    [compiled] = testing.compile_on_fake_ranks(make, 64, sharding_strategy=strategy, prefetch=prefetch)
    testing.assert_waits_right_before_first_consumer(compiled)
    testing.assert_gathers_in_consumer_order(compiled)
    testing.assert_prefetch_distance(compiled, prefetch)
    testing.assert_reductions_right_after_last_gradient(compiled)
    testing.assert_no_parameter_copies(compiled)
    testing.assert_buckets_in_flight_at_most(compiled, prefetch + 1)
    if strategy == "zero3":
        testing.assert_gathered_buckets_at_most(compiled, prefetch + 1)
        largest = max(g.nbytes for g in testing.gathers(compiled.forward))
        testing.assert_unsharded_bytes_at_most(compiled, (prefetch + 1) * largest)
        testing.assert_bytes_in_flight_at_most(compiled, f"{(prefetch + 1) * largest}B")
        with pytest.raises(AssertionError, match="buckets are unsharded"):
            testing.assert_gathered_buckets_at_most(compiled, prefetch)
        with pytest.raises(AssertionError, match="bytes are unsharded"):
            testing.assert_unsharded_bytes_at_most(compiled, f"{largest}B")
        with pytest.raises(AssertionError, match="gathers are in flight"):
            testing.assert_buckets_in_flight_at_most(compiled, prefetch)
        with pytest.raises(AssertionError, match="bytes are in flight"):
            testing.assert_bytes_in_flight_at_most(compiled, largest)


def test_all_ranks_have_the_same_schedule_although_their_shards_differ():
    compiled = testing.compile_on_fake_ranks(lambda: make(1), 3, ranks=range(3))
    testing.assert_same_schedule_on_all_ranks(compiled)


def test_different_models_on_ranks_fail_the_assertion_of_equal_schedules():
    sizes = iter([1, 2])
    compiled = testing.compile_on_fake_ranks(lambda: make(next(sizes)), 2, ranks=range(2))
    with pytest.raises(AssertionError, match=r"rank 1 issues fsdp_all_gather blocks\.1"):
        testing.assert_same_schedule_on_all_ranks(compiled)


COPIES = {
    "cat": lambda m, x: x @ torch.cat([m.left.weight, m.right.weight], 1),
    "clone": lambda m, x: x @ m.left.weight.t().clone() @ m.right.weight,
}
"""Forwards that copy parameters."""


@pytest.mark.parametrize(("kind", "buckets"), [("cat", r"\['left', 'right'\]"), ("clone", r"\['left'\]")])
def test_copies_of_parameters_are_found_through_views(kind, buckets):
    model = Calling(COPIES[kind], left=nn.Linear(4, 4), right=nn.Linear(4, 4))
    [compiled] = testing.compile_on_fake_ranks(lambda: (model, (torch.ones(2, 4),)), 2)
    with pytest.raises(AssertionError, match=rf"{kind} copies parameters of {buckets}"):
        testing.assert_no_parameter_copies(compiled)


def test_compiled_traces_do_not_keep_a_destroyed_process_group_alive():
    [compiled] = testing.compile_on_fake_ranks(lambda: make(1), 2)
    issue = next(b for b in compiled.forward.bound_symbols if b.sym.name == "fsdp_all_gather")
    with pytest.raises(RuntimeError, check=coded("ranks.process-group-destroyed", "default_pg")):
        _ = issue.args[0].ranks.group.process_group


def test_the_example_pins_a_schedule_until_it_is_updated(pytester):
    code = (Path(__file__).resolve().parents[1] / "examples" / "test_schedule.py").read_text()
    assert "prefetch=1" in code

    def run(prefetch: int, *options: str):
        pytester.makepyfile(test_pinned=code.replace("prefetch=1", f"prefetch={prefetch}"))
        return pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *options)

    run(1).stdout.fnmatch_lines(["*no schedule is pinned in*--update-schedules*"])
    run(1, "--update-schedules").assert_outcomes(passed=1)
    run(1).assert_outcomes(passed=1)
    changed = run(0)
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*is not the one pinned in*", "*fsdp_all_gather*"])
