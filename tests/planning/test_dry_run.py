"""Planning a step from the command line: tracing on the meta device, simulation, pictures, files, diffs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.extras.command_line import app
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.planning import dry_run_step, optimizer_step_bytes, with_optimizer
from thunder_fsdp_sched.reports import plot_timelines
from thunder_fsdp_sched.testing import assert_peak_memory_at_most, compile_on_fake_ranks

import pytest
import thunder
import torch
from coded import coded
from memory_count import Tracker
from models import Layer, Stack, modeled
from profiles import LONG_ONLY
from torch.distributed.fsdp import MixedPrecisionPolicy
from typer.testing import CliRunner


def make_on_meta():
    with torch.device("meta"):
        return Stack(2, 32), (torch.randn(4, 32),)


def invoke(*arguments: str, exit_code: int = 0) -> str:
    """Run a command in a narrow terminal, check its exit code, and return what it prints."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == exit_code, result.output
    return result.output


def words(output: str) -> str:
    """Return an output without its frames and line breaks."""
    return " ".join(output.replace("\u2502", " ").split())


def test_plan_prints_the_step_and_writes_the_requested_files(tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("step.png", "step.json", "one.json", "memory.png")]
    outputs = ["--picture", str(files[0]), "--perfetto", str(files[1]), "--schedule", str(files[2])]
    outputs += ["--memory", str(files[3])]
    planned = ("plan", "test_dry_run:make_on_meta", "--world-size", "16")
    hook = sys.excepthook
    output = invoke(*planned, *outputs)
    assert sys.excepthook is hook, 'torch puts "[rank0]: " in front of tracebacks while there is a process group'
    assert "fits on h100-sxm: 80 GB free of 80 GB" in output
    assert "gradients written in place: 37.9 kB of 37.9 kB" in output
    step = dry_run_step(make_on_meta, world_size=16, on="h100-sxm")
    share = step.after.exposed_seconds / step.after.step_seconds
    [axes] = plot_timelines([("scheduled", step.after)]).axes
    labels = {text.get_text() for text in axes.texts}
    assert " backward" in labels and labels & {"0", "blocks.0"} and labels & {"1", "blocks.1"}
    assert f"{share:6.1%} of the step is exposed communication" in output and "bound by links" in output
    assert re.search(r"^  0.0% of the memory is used at the peak, \d+% of it by ", output, re.MULTILINE), output
    assert all(file.stat().st_size for file in files)
    [step] = tfs.fsdp(schedule=files[2]).options.schedule
    assert {op.bucket for op in step.forward} == {"first", "blocks.0", "blocks.1", "last"}
    events = json.loads(files[1].read_text())["traceEvents"]
    gathers = [e["args"] for e in events if e.get("cat") == "fsdp_all_gather" and "position" in e["args"]]
    assert [g["trace"] for g in gathers] == [0, 0, 0, 0, 1] and max(
        e["args"]["bytes"] for e in events if e["ph"] == "C"
    ) > 0

    other = tmp_path / "other.json"
    limits = ["--max-gathers-in-flight", "1", "--optimizer-bytes", "1e9", "--optimizer-step-bytes", "1e8"]
    limited = invoke(*planned, *limits, "--schedule", str(other), "--memory", str(tmp_path / "memory.json"))
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert min(memory["bytes"]["optimizer state"]) > 80e9 and memory["bytes"]["unsharded buckets"][0] % 512 == 0
    assert len(memory["statements"]) == len(memory["bytes"]["shards"]) and memory["tensors"][0]["nbytes"]
    assert re.search(r"^does not fit on h100-sxm: [\d,.]+ GB too much of 80 GB$", limited, re.MULTILINE), limited
    assert "gathers in flight, at most: forward 1, backward 1" in limited
    assert memory["statements"][-1] == "optimizer.step" and " in optimizer.step, at position " in limited
    invoke("diff", str(files[2]), str(files[2]))
    assert "fsdp_all_gather" in invoke("diff", str(files[2]), str(other), exit_code=1)


@LONG_ONLY
def test_a_model_by_name_is_planned_in_mixed_precision_with_optimizer_state_in_float32(monkeypatch, tmp_path):
    def decoder(length: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(512, 32), *(Layer(32) for _ in range(4)), torch.nn.Linear(32, 512, bias=False)
        )

    stand_in = SimpleNamespace(Config=SimpleNamespace(from_name=lambda name, block_size: block_size), GPT=decoder)
    monkeypatch.setitem(sys.modules, "litgpt", stand_in)
    planned = ("plan", "Llama-3-8B", "--world-size", "4", "--length", "64", "--memory", str(tmp_path / "memory.json"))
    output = invoke(*planned)
    assert "gradients written in place: 0 B" in output and "computed in bfloat16, reduced in float32" in words(output)
    fixed = json.loads((tmp_path / "memory.json").read_text())["bytes"]
    state = fixed["optimizer state"][0]
    assert state == pytest.approx(2 * fixed["shards"][0], rel=0.1)  # which the allocator rounds up
    assert re.search(r"^shards float32, computed in bfloat16, reduced in float32$", output, re.MULTILINE)
    assert re.search(r"^  \d x model\.\d-\d", output, re.MULTILINE), "blocks that are alike have one row"
    assert re.search(r"^ .*, the loss$", output, re.MULTILINE), "the largest tensors are those of the loss"
    assert "blocks and lines of the model" in output and not re.search(r"(dry_run|linear)\.py:", output)
    low = invoke(*planned, "--dtype", "bfloat16", "--mixed-precision", "none")
    assert re.search(r"^shards bfloat16, computed in bfloat16, reduced in bfloat16$", low, re.MULTILINE)
    in_bfloat16 = json.loads((tmp_path / "memory.json").read_text())["bytes"]["optimizer state"][0]
    assert in_bfloat16 == pytest.approx(state / 2, rel=0.1)


def test_a_hybrid_step_is_planned_on_the_links_of_both_mesh_dimensions():
    planned = ("plan", "test_dry_run:make_on_meta", "--world-size", "64", "--replicas")
    assert "8 x 8" in invoke(*planned, "8") and "8 x 8" not in invoke(*planned, "1")
    step = dry_run_step(make_on_meta, world_size=64, replicas=8, on="h100-sxm")
    assert set(step.after.communication_seconds) == {"mesh_shard", "mesh_replicate"}
    assert all(seconds > 0 for seconds in step.after.communication_seconds.values())
    assert "replicas: 64 ranks cannot hold 7 copies" in words(invoke(*planned, "7", exit_code=2))


def test_trace_and_plan_take_the_same_options_a_cluster_in_a_file_and_a_model_in_the_current_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "of_this_folder.py").write_text("from test_dry_run import make_on_meta as make")
    path = tmp_path / "ours.json"
    path.write_text('{"like": "h100-sxm", "inter_node_bandwidth": "1GB"}')
    common = f"of_this_folder:make --world-size 16 --cluster {path} --cluster-set contention=0".split()
    common += ["--sharding", "zero2", "--bucketing", "100kB", "--prefetch", "auto", "--transport", "coalesced"]
    for command, expected in (
        ("trace", ["ZeRO-2, 16 ranks, forward, before sorting", "ZeRO-2, 16 ranks, backward, after sorting"]),
        ("plan", ["one step on ours", " ms = ", "launch gaps"]),
    ):
        output = invoke(command, *common)
        assert len(re.findall(r"^coalesced: ", output, re.MULTILINE)) == 1
        assert all(text in " ".join(output.split()) for text in expected), output


def sent(compiled):
    """Return the communication of a step."""
    halves = compiled.schedule.forward, compiled.schedule.backward
    return [(op.kind, op.bucket, op.nbytes, op.transport, op.slot, op.position) for half in halves for op in half]


def compile_on_gloo(rank: int, world_size: int):
    model = thunder.jit(Stack(2, 32), transforms=[transform := tfs.fsdp(agree="compile")])
    model(torch.ones(4, 32)).sum().backward()
    return sent(transform.compiled[-1])


def test_a_plan_sends_what_the_ranks_send(ranks):
    step = dry_run_step(make_on_meta, world_size=2, on="cpu-2core", agree="compile")
    assert {bucket.comm.transport for bucket in step.transform.plan} == {"all_to_all"}
    assert ranks.run(compile_on_gloo) == 2 * [sent(step.compiled)]


def make_rows_of_two_widths(device: str = "meta"):
    with torch.device(device):
        return torch.nn.Sequential(torch.nn.Linear(5, 3, False), torch.nn.Linear(3, 7, False)), (torch.randn(2, 5),)


def test_the_backend_of_the_planned_ranks_decides_on_the_transport():
    one_bucket = {"bucketing_strategy": lambda name, param: "all"}

    def transport(compiled):
        return {bucket.spec.comm.transport for bucket in compiled.buckets}

    for device, cluster, expected in (
        ("meta", None, "coalesced"),
        ("cpu", None, "all_to_all"),
        ("meta", "cpu-2core", "all_to_all"),
        ("cpu", "h100-sxm", "coalesced"),
    ):
        make = partial(make_rows_of_two_widths, device)
        [compiled] = compile_on_fake_ranks(make, 2, cluster=cluster, **one_bucket)
        assert transport(compiled) == {expected}, (device, cluster)
    step = dry_run_step(partial(make_rows_of_two_widths, "cpu"), world_size=2, on="h100-sxm", **one_bucket)
    assert transport(step.compiled) == {"coalesced"}
    on_gloo = dataclasses.replace(step.cluster, backend="gloo")
    step = dry_run_step(partial(make_rows_of_two_widths, "cpu"), world_size=2, on=on_gloo, **one_bucket)
    assert transport(step.compiled) == {"all_to_all"}
    policy = MixedPrecisionPolicy(param_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, check=coded("transport.refused-for-bucket", "gloo", "torch.float8_e5m2")):
        dry_run_step(make_rows_of_two_widths, world_size=2, on="cpu-2core", mp_policy=policy)


def test_the_device_of_the_planned_ranks_decides_on_the_memory_of_encoding():
    def make(device):
        with torch.device(device):
            return Stack(1, 32), (torch.randn(4, 32),)

    found = {}
    for device, cluster in (("cpu", None), ("meta", "cpu-2core"), ("meta", None), ("cpu", "h100-sxm")):
        policy = tfs.CommPolicy("int8", "int8", block=5)  # the last block is not full
        [compiled] = compile_on_fake_ranks(partial(make, device), 2, cluster=cluster, comm_policy=policy)
        labels = ("encoding", "decoding", "temporary memory")
        found[device, cluster] = {t.name: t.nbytes for t in compiled.memory.tensors if t.name.startswith(labels)}
    assert found["meta", "cpu-2core"] == found["cpu", None] != found["meta", None] == found["cpu", "h100-sxm"]
    blocks = 2 * 32 * 64 // 2 // 5  # full ones of each rank in two layers: codes of both ranks, and scales in float32
    assert found["meta", None]["encoding (blocks.0)"] == 2 * blocks * (5 + 4)
    assert found["cpu", None]["encoding (blocks.0)"] == blocks * 5 * 4, "scaled in float32, a rank after the other"


@modeled(linear=partial(torch.nn.Linear, 8, 8))
def AddsInPlace(self, x, y):
    h = self.linear(x + y)
    y.add_(1.0)
    return h * y


def test_tensors_on_the_meta_device_share_memory_only_if_they_are_views():
    with torch.device("meta"):
        x = torch.randn(4, 8)
        step = dry_run_step(lambda: (AddsInPlace(), (x, torch.randn(4, 8))), world_size=8, on="h100-sxm")
        assert step.seconds > 0
        with pytest.raises(RuntimeError, check=coded("module.changes-arguments-sharing-memory")):
            dry_run_step(lambda: (AddsInPlace(), (x, x[:])), world_size=8, on="h100-sxm")
        viewed = AddsInPlace()
        viewed.register_buffer("row", viewed.linear.weight.data[0])
        with pytest.raises(
            ValueError, check=coded("parameter.memory-shared-with-other-tensor", "buffer 'row'", "'linear.weight'")
        ):
            dry_run_step(lambda: (viewed, (x, x)), world_size=8, on="h100-sxm")


def test_a_planned_step_has_the_memory_that_its_optimizer_allocates():
    step = dry_run_step(make_on_meta, world_size=2, on="h100-sxm")
    shards = sum(bucket.shard.nbytes for bucket in step.compiled.buckets)
    plain, memory = step.memory, with_optimizer(step)
    assert memory.totals[:-1] == tuple(nbytes + 2 * shards for nbytes in plain.totals)
    gradients = plain.bytes_of("gradients")[-1]
    assert gradients >= shards
    allocated = {kind: memory.bytes_of(kind)[-1] for kind in ("gradients", "temporaries", "saved for backward")}
    assert allocated == {"gradients": gradients, "temporaries": shards, "saved for backward": 0}
    assert memory.wasted == (*plain.wasted, plain.bytes_of("unsharded buckets")[-1])
    adamw = {"optimizer_state": 2 * shards, "optimizer_step": shards}
    peak = step.compiled.memory.with_optimizer_state(*adamw.values()).peak.nbytes
    assert_peak_memory_at_most(step.transform, peak, **adamw)
    with pytest.raises(AssertionError, match=r"in optimizer\.step"):
        assert_peak_memory_at_most(step.transform, peak - 1, **adamw)
    assert memory.peak.phase == "optimizer.step" and with_optimizer(step, allocated=0).peak.phase == "backward"


@pytest.mark.parametrize(
    ("optimizer", "options", "predict"),
    [
        (torch.optim.AdamW, {"foreach": True}, optimizer_step_bytes),
        (torch.optim.AdamW, {}, partial(optimizer_step_bytes, foreach=False)),  # torch's default on a CPU
        (torch.optim.AdamW, {"fused": True}, partial(optimizer_step_bytes, per_element=0)),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}, partial(optimizer_step_bytes, per_element=0)),
    ],
)
def test_optimizers_allocate_the_predicted_bytes(optimizer, options, predict):
    with fake_rank(0, 2):
        model = thunder.jit(Stack(1, 32), transforms=[transform := tfs.fsdp()])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        updates = optimizer(model.parameters(), **options)
        updates.step()  # makes the state
        tracker = Tracker()
        with tracker:
            updates.step()
        predicted = predict(transform.sharded.buckets)
        assert predicted <= tracker.peak <= predicted + 64, "besides counters of steps"


def make_nothing():
    return 1


def make_never():
    raise AssertionError("the arguments are invalid, so nothing is made")


def make_a_list():
    return [torch.nn.Linear(2, 2), torch.randn(1, 2)]


NOT_A_FUNCTION = 3

NEVER = "test_dry_run:make_never"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("plan", "test_dry_run:make_on_meta", "--dtype", "foo"), "torch has no dtype 'foo'"),
        (("plan", "test_dry_run:make_on_meta", "--dtype", "nn"), "torch has no dtype 'nn'"),
        (
            ("plan", "test_dry_run:make_on_meta", "--mixed-precision", "foo"),
            "mixed-precision: torch has no dtype 'foo'",
        ),
        (("plan", "test_dry_run:make_nothing"), "'make_nothing' must return (module, args)"),
        (("plan", "test_dry_run:make_a_list"), "but returned a list"),
        (("plan", "test_dry_run:NOT_A_FUNCTION"), "is of type int, not a function that makes a model"),
        (("plan", "test_dry_run:make_on_meta", "--bucketing", "foo"), "foo"),
        (("plan", "no-such-model"), "'no-such-model' is neither"),
        (("plan", "no-such-model"), "hugging_face: "),
        (("plan", ":make"), "cannot be imported"),
        (("plan", "no_such_module:make"), "no_such_module"),
        (("plan", "test_dry_run:make_on_meta", "--cluster", "nowhere"), "nowhere"),
        (("trace", "test_dry_run:make_nothing"), "must return (module, args)"),
        (("trace", "test_dry_run:NOT_A_FUNCTION"), "is of type int, not a function that makes a model"),
        (("trace", "test_dry_run:make_on_meta", "--bucketing", "foo"), "foo"),
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", "test_dry_run:make_on_meta", "--cluster-set", "links=3"), "a cluster has no links"),
        (("plan", "test_dry_run:make_on_meta", "--sharding", "zero2", "--secondary-ranks", "2"), "secondary_ranks"),
        (("diff", "nowhere.json", "nowhere.json"), "nowhere.json"),
        (("plan", NEVER, "--world-size", "0"), "Invalid value for '--world-size'"),
        (("plan", NEVER, "--world-size", "1000000000"), "Invalid value for '--world-size'"),
        (("plan", NEVER, "--prefetch", "-1"), "prefetch: expected 0 or more"),
        (("plan", NEVER, "--prefetch", "1.5"), "--prefetch: expected a number of buckets or auto, got '1.5'"),
        (("plan", NEVER, "--optimizer-bytes", "inf"), "--optimizer-bytes: expected a finite number, got inf"),
        (("plan", "llama", "--length", "0"), "Invalid value for '--length'"),
        (("plan", NEVER, "--batch", "64", "--dtype", "float16"), "--batch, --dtype: only for models by name"),
        (("trace", NEVER, "--length", "2048"), "--length: only for models by name"),
        (("plan", NEVER, "--picture", "step.xyz"), "--picture: the name step.xyz must end with"),
        (("plan", NEVER, "--memory", "step.xyz"), "--memory: the name step.xyz must end with .json or"),
        (("plan", NEVER, "--perfetto", "step.png"), "--perfetto: the name step.png must end with .json"),
        (("plan", NEVER, "--schedule", "no/one.json"), "--schedule: no/one.json cannot be written: No such file"),
        (("plan", NEVER, "--schedule", "no/one.json"), "; create the folder no"),
        (("plan", NEVER, "--schedule", "a.json", "--memory", "./a.json"), "--memory: --schedule already writes a.json"),
        (("plan", NEVER, "--cluster-set", "devices_per_node=2.5"), "devices_per_node must be a positive whole number"),
        (("exposed", "nowhere.json", "--save", "exposed.xyz"), "--save: the name exposed.xyz must end with"),
    ],
)
def test_invalid_arguments_are_usage_errors(arguments, message):
    output = invoke(*arguments, exit_code=2)
    assert message in words(output), output


def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    folder, kept = tmp_path / "folder.json", tmp_path / "kept.json"
    kept.write_text("of an earlier run")
    output = invoke("plan", NEVER, "--perfetto", str(kept), "--schedule", str(folder), exit_code=2)
    assert "cannot be written: Is a directory" in words(output) and kept.read_text() == "of an earlier run"
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    for arguments in (("plan", NEVER, "--picture"), ("plan", NEVER, "--memory"), ("exposed", "nowhere.json", "--save")):
        output = invoke(*arguments, str(tmp_path / "new.png"), exit_code=2)
        assert "pictures need matplotlib: pip install 'thunder_fsdp_sched[plot]'" in words(output)
    assert set(tmp_path.iterdir()) == {folder, kept}
