"""Schedules as values: reasons, files, diffs, and replay."""

import dataclasses
import functools
import json
import operator
import pickle
import subprocess
import sys

from thunder_fsdp_sched import CommOp, Schedule, ScheduleMismatch, fsdp
from thunder_fsdp_sched.extras.replay import replay_schedule
from thunder_fsdp_sched.planning import compile_as_rank

import pytest
import torch
from coded import coded
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import assign_slots, read_schedule, sort_communication, verify
from models import Stack
from synthetic_traces import chain
from test_passes import PLAIN_TRACES


def scheduled(trace, prefetch: int = 1):
    return verify(assign_slots(sort_communication(trace, prefetch=prefetch)))


def test_every_op_has_a_reason_for_its_position():
    schedule = read_schedule(scheduled(chain(3)))
    assert [op.kind for op in schedule] == ["fsdp_all_gather", "fsdp_all_gather", "fsdp_wait_params"] + [
        "fsdp_all_gather", "fsdp_wait_params", "fsdp_wait_params",
    ]  # fmt: skip
    assert all(op.reason for op in schedule)
    assert schedule.ops[1].reason == "prefetch: 1 ahead of its wait, before the wait for b0"
    assert schedule.ops[2].reason == "first consumer: t6 = matmul"
    assert schedule.ops[2].first_consumer == schedule.ops[2].position + 1
    assert "b2" in str(schedule) and "slot_0" in str(schedule)


@functools.cache
def compiled(*, grad: bool = True):
    with torch.set_grad_enabled(grad):
        return compile_as_rank(lambda: (Stack(1), (torch.ones(2, 4),)), fsdp(), rank=0, world_size=2)


@pytest.mark.parametrize("grad", [False, True])
def test_a_schedule_survives_saving_and_loading(tmp_path, grad):
    transform = compiled(grad=grad)
    transform.save_schedules(tmp_path / "schedule.json")
    assert list(fsdp(schedule=tmp_path / "schedule.json").options.schedule) == list(transform.schedules)
    assert [step.backward is not None for step in transform.schedules] == [grad]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 99, "steps": []}', '{"format": 1, "steps": [{}]}', "[" * 200_000 + "]" * 200_000],
    ids=["nothing", "list", "empty", "another format", "empty step", "nested too deeply"],
)
def test_a_file_without_a_schedule_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    nested = content.startswith("[[")
    code = "schedule.file-nested-too-deeply" if nested else "schedule.file-not-valid"
    with pytest.raises(ValueError, check=coded(code, "broken.json")):
        fsdp(schedule=path)


def test_a_file_of_schedules_is_replaced_at_once_and_a_link_to_it_stays(tmp_path):
    """So ranks that save to the same path and read it never find a part of a file."""
    file, link = tmp_path / "schedule.json", tmp_path / "link.json"
    file.write_text("before")
    link.symlink_to(file)
    with file.open() as reader:
        compiled().save_schedules(link)
        assert reader.read() == "before"
    assert link.is_symlink() and json.loads(file.read_text())["steps"]
    assert sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize(
    "path, value, fault",
    [
        (("steps",), {}, "steps: expected list, got dict"),
        (("steps", 0), 1, "steps[0]: expected dict, got int"),
        (("steps", 0, "no_sync"), 0, "steps[0].no_sync: expected bool, got int"),
        (("steps", 0, "forward"), None, "steps[0].forward: expected dict, got NoneType"),
        (("steps", 0, "backward"), [], "steps[0].backward: expected dict or null, got list"),
        (("steps", 0, "forward", "statements"), "9", "forward.statements: expected int, got str"),
        (("steps", 0, "forward", "compute"), ..., "steps[0].forward has no 'compute'"),
        (("steps", 0, "forward", "ops", 1, "position"), True, "forward.ops[1].position: expected int, got bool"),
        (("steps", 0, "forward", "ops", 1, "bucket"), ["b"], "forward.ops[1].bucket: expected str, got list"),
        (("steps", 0, "forward", "ops", 1, "first_consumer"), 1.5, "first_consumer: expected int or null, got float"),
        (("steps", 0, "forward", "ops", 1, "when"), 1, "forward.ops[1].when is unknown"),
        (("format",), ..., "format None"),
    ],
)
def test_an_invalid_field_in_a_file_is_refused_by_name(tmp_path, path, value, fault):
    file = tmp_path / "spoiled.json"
    compiled().save_schedules(file)
    content = json.loads(file.read_text())
    *above, last = path
    container = functools.reduce(operator.getitem, above, content)
    if value is ...:
        del container[last]
    else:
        container[last] = value
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, check=coded("schedule.file-not-valid", "spoiled.json", fault)):
        fsdp(schedule=file)


def test_a_diff_shows_what_moved():
    near, far = (read_schedule(scheduled(chain(3), prefetch)) for prefetch in (1, 2))
    assert near.diff(near) == ""
    assert "b2" in near.diff(far)


@settings(deadline=None)
@given(PLAIN_TRACES, st.integers(0, 3))
def test_a_replayed_schedule_gives_the_same_trace(trace, prefetch):
    pinned = scheduled(trace, prefetch)
    again = verify(assign_slots(replay_schedule(trace, schedule=read_schedule(pinned))))
    assert [str(b) for b in again.bound_symbols] == [str(b) for b in pinned.bound_symbols]


def test_replaying_a_schedule_of_another_model_fails_with_the_line():
    refusal = coded("schedule.line-does-not-fit-trace", "line 8", "fsdp_all_gather", "b4")
    with pytest.raises(ScheduleMismatch, check=refusal):
        replay_schedule(chain(4), schedule=read_schedule(scheduled(chain(5))))
    with pytest.raises(ScheduleMismatch, check=coded("schedule.lacks-op-of-bucket", "fsdp_all_gather", "b3")):
        replay_schedule(chain(4), schedule=read_schedule(scheduled(chain(3))))


def test_replaying_a_schedule_with_another_bucket_size_fails():
    schedule = read_schedule(scheduled(chain(2)))
    op = dataclasses.replace(schedule.ops[0], nbytes=1)
    with pytest.raises(ScheduleMismatch, check=coded("schedule.line-has-other-bytes", "line 1 ", "1,024 bytes")):
        replay_schedule(chain(2), schedule=dataclasses.replace(schedule, ops=(op, *schedule.ops[1:])))


def test_a_wrong_schedule_is_caught_by_verify():
    trace = chain(3)
    schedule = read_schedule(scheduled(trace))
    # Swap the first wait with the compute after it.
    ops = [dataclasses.replace(op, position=op.position + (i == 2)) for i, op in enumerate(schedule)]
    moved = replay_schedule(trace, schedule=dataclasses.replace(schedule, ops=tuple(ops)))
    with pytest.raises(AssertionError, check=coded("proof.invalid-bound-symbol", "which nothing before it defines")):
        verify(assign_slots(moved))


def test_a_schedule_counts_alike_in_a_process_without_the_extras() -> None:
    kinds = "fsdp_all_reduce", "fsdp_serve_gather", "fsdp_accumulate_reduced", "fsdp_wait_served"
    ops = tuple(CommOp(i, kind, "block", 8, "float32", "ranks", "flat", "", None, "") for i, kind in enumerate(kinds))
    schedule = Schedule(ops, 9, "digest")
    count = "[op.issues for op in schedule], schedule.gathers_in_flight, len(schedule.collectives())"
    program = f"import pickle, sys; schedule = pickle.load(sys.stdin.buffer); print(({count}))"
    result = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(schedule), capture_output=True, check=True
    )
    assert result.stdout.decode().strip() == "([True, True, False, False], 1, 2)"
