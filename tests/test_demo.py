"""The demo: its command line, examples, the step counter and its checks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.planning import compile_as_rank

import demo
import pytest
import torch
import torch.distributed as dist
from demo import DemoOptions, Run
from forked import run_python
from models import linear_gpt
from safetensors.torch import load_file
from step_counter import StepCounter, StepCounts
from torch.distributed.launcher.api import LaunchConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
#
# The command line and the examples
#


def test_ranks_of_the_demo_that_fail_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: LaunchConfig, entrypoint: object) -> Callable[[DemoOptions], dict[int, int]]:
        assert config.max_restarts == 0
        return lambda options: {0: 5}

    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    monkeypatch.setattr(demo, "elastic_launch", launch)
    assert demo.run_demo(DemoOptions()) == 5


def test_the_training_example_trains(tmp_path: Path) -> None:
    result = run_python(*TORCHRUN, EXAMPLES / "train.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "fsdp_all_gather" in result.stdout
    assert torch.load(tmp_path / "weights.pt")["0.weight"].shape == (256, 64)


def test_the_restartable_example_finishes_after_kills_while_it_saves(tmp_path: Path) -> None:
    """Each start of the script but the last dies at another point, and torchrun restarts it."""
    script = (EXAMPLES / "resume.py").read_text()
    shorter = {"(first, 200)": "(first, 4)", "step % 50 == 49": "step % 2 == 1", "_ in range(2)": "_ in range(1)"}
    for long, short in shorter.items():
        assert long in script
        script = script.replace(long, short)
    (tmp_path / "train.py").write_text(_KILLS + script)
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ["--max-restarts", "3", "--monitor-interval", "0.1"]
    result = run_python(*TORCHRUN, *options, "train.py", "run", cwd=tmp_path, env=environment)
    output = result.stdout + result.stderr
    at_exit = "terminate called without an active exception" in output  # gloo, in the last line of the script
    assert result.returncode == 0 or at_exit, output
    assert {path.name for path in tmp_path.glob("died in *")} == {"died in finish", "died in destroy_process_group"}
    assert "goes on with step 2" in output and "goes on with step 4" in output, output
    checkpoints = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert checkpoints == ["model", "step-1", "step-3"]
    index = json.loads((tmp_path / "run" / "model" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert {path.name for path in (tmp_path / "run" / "model").iterdir()} == {*files, "model.safetensors.index.json"}
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(tmp_path / "run" / "model" / file)
    assert tensors["0.weight"].shape == (256, 64) and len(tensors) == 7


_KILLS = """
import os, sys
from pathlib import Path
import torch.distributed
from torch.distributed.checkpoint.filesystem import FileSystemWriter

def _die_once(module, name, call, calls=[]):
    def counted(*args, _function=getattr(module, name), **kwargs):
        calls.append(name)
        died = Path(sys.argv[1]).parent / f"died in {name}"
        if os.environ["RANK"] == "0" and calls.count(name) == call and not died.exists():
            died.touch()
            os._exit(9)
        return _function(*args, **kwargs)

    setattr(module, name, counted)

_die_once(FileSystemWriter, "finish", 2)  # the second checkpoint is written but for its list of contents
_die_once(torch.distributed, "destroy_process_group", 1)  # everything is saved
"""


#
# The step counter
#


def test_counter_tracks_when_parameters_are_unsharded(fake_ranks: None) -> None:
    shards = [torch.ones(4, 8) for _ in range(3)]
    slot = torch.empty(2, 8, 8)
    x = torch.ones(2, 8)
    with StepCounter(shards) as counter:
        with counter.phase("shared slots"):
            dist.all_gather_into_tensor(slot[0], shards[0])
            dist.all_gather_into_tensor(slot[1], shards[1])
            x @ slot[0]
            dist.all_gather_into_tensor(slot[0], shards[2])
            x @ slot[1]
            x @ slot[0]
        with counter.phase("no parameters"):
            slot[0].copy_(torch.ones(8, 2) @ x)
        with counter.phase("a gradient in the place of a parameter"):
            dist.all_gather_into_tensor(slot[0], shards[0])
            x @ slot[0]
            dist.all_gather_into_tensor(slot[1], shards[1])
            torch.mm(torch.ones(8, 2), x, out=slot[0])  # overwrites the slot without reading it
        with counter.phase("new memory"):
            fresh = [torch.empty(8, 8) for _ in shards]
            for whole, shard in zip(fresh, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard)
            x @ fresh[0]
        with counter.phase("memory held"):
            x + 1
        del whole, fresh
        with counter.phase("memory freed"):
            x + 1
    counts = counter.counts()
    assert counts.peak_unsharded_bytes == {
        "shared slots": 2 * 256,
        "no parameters": 0,
        "a gradient in the place of a parameter": 256,
        "new memory": 3 * 256,
        "memory held": 3 * 256,
        "memory freed": 0,
    }
    assert counts.unsharded_bytes_allocated == 3 * 256


def test_counter_distinguishes_copies_of_parameters_and_of_gradients(fake_ranks: None) -> None:
    shard, unsharded, gradients = torch.ones(4, 8), torch.empty(8, 8), torch.empty(8, 8)
    with StepCounter([shard]) as counter:
        dist.all_gather_into_tensor(unsharded, shard)
        (torch.ones(2, 8) @ unsharded.t()).clone()  # neither parameters nor gradients
        copies = shard.clone(), unsharded[:2].clone()
        gradients.copy_(torch.ones(8, 8) @ torch.ones(8, 8) / 2)  # scaled into new memory, then copied
        dist.reduce_scatter_tensor(torch.empty(4, 8), gradients)
    counts = counter.counts()
    assert [(c.kind, c.nbytes) for c in counts.collectives] == [("all_gather", 256), ("reduce_scatter", 256)]
    assert counts.parameter_bytes_copied == sum(copy.nbytes for copy in copies)
    assert counts.gradient_bytes_copied == 2 * 256


#
# The demo's checks, on the traces of a tiny model
#


@pytest.fixture(scope="module")
def tiny_run() -> Run:
    """A ZeRO-3 run of a tiny model, with the counts that it should have."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    shape = DemoOptions(blocks=2, width=16, length=8)
    transform = compile_as_rank(lambda: (linear_gpt(shape), (tokens, tokens)), fsdp(), rank=0, world_size=2)
    traces = transform.compiled[-1]
    assert traces.forward_schedule is not None and traces.backward_schedule is not None
    with StepCounter([]) as counter:
        pass
    issued = [op for op in (*traces.forward_schedule, *traces.backward_schedule) if op.travels]
    sent = tuple(op for op in issued if op.kind in ("fsdp_all_gather", "fsdp_reduce_scatter"))
    peaks = {"forward": 100, "backward": 100}
    counts = dataclasses.replace(counter.counts(), collectives=sent, peak_unsharded_bytes=peaks)
    return Run("ZeRO-3", [5.0, 4.0, 3.0], {"w": torch.ones(2)}, counts, True, 1.0, 0.1, 0, transform.plan, traces)


def failed_promises(run: Run, reference: Run) -> list[str]:
    checks = demo.check_run(run, reference, reference, DemoOptions(steps=3))
    return [promise for promise, passed, _ in checks if not passed]


def with_counts(run: Run, **counts: object) -> Run:
    new: StepCounts = dataclasses.replace(run.counts, **counts)  # type: ignore[arg-type]
    return dataclasses.replace(run, counts=new)


def test_each_check_fails_for_its_fault(tiny_run: Run) -> None:
    assert tiny_run.traces is not None and failed_promises(tiny_run, tiny_run) == []
    before = dataclasses.replace(
        tiny_run.traces, forward=tiny_run.traces.forward_before, backward=tiny_run.traces.backward_before
    )
    peaks = {"forward": 100, "backward": 1 << 30}
    faults = {
        "losses equal": dataclasses.replace(tiny_run, losses=[5.0, 4.0, 3.1]),
        "parameters equal the unsharded": dataclasses.replace(tiny_run, parameters={"w": torch.tensor([1.0, 1.1])}),
        "bit for bit": dataclasses.replace(tiny_run, parameters={"w": torch.tensor([1.0, 1.000001])}),
        "the model learns": dataclasses.replace(tiny_run, losses=[5.0, 4.0, 5.0]),
        "no parameter bytes are copied": with_counts(tiny_run, parameter_bytes_copied=4),
        "allocates no memory": with_counts(tiny_run, unsharded_bytes_allocated=4),
        "same collectives in the same order": dataclasses.replace(tiny_run, alike=False),
        "as many collectives as its traces": with_counts(tiny_run, collectives=tiny_run.counts.collectives[1:]),
        "ahead of its own wait": dataclasses.replace(tiny_run, traces=before),
        "backward holds at most 2.1 blocks": with_counts(tiny_run, peak_unsharded_bytes=peaks),
    }
    for promise, run in faults.items():
        assert any(promise in f for f in failed_promises(run, tiny_run)), f"{promise!r} did not fail"
