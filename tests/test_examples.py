"""The scripts in ``examples/`` that no other file runs, and the demo's step counter and checks.

``test_fabric`` runs ``fabric.py``, ``test_testing`` runs
``test_schedule.py``, and ``real_models/test_huggingface.py`` runs ``huggingface.py`` and ``trainer.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.planning import DryRun, compile_as_rank

import demo
import profiles
import pytest
import torch
import torch.distributed as dist
from demo import DemoOptions, Run
from forked import run_python
from models import linear_gpt
from ranks import on_ranks
from safetensors.torch import load_file
from scenario import everywhere
from step_counter import StepCounter, StepCounts

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    """Import an example without running it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_ranks()
def test_evaluate_gives_the_loss_of_unpadded_batches_and_generates(rank: int) -> None:
    example = load("evaluate")
    jitted_modules: list[Any] = []
    jit = example.thunder.jit
    example.thunder.jit = lambda model, **options: jitted_modules.append(jit(model, **options)) or jitted_modules[0]
    try:
        loss, tokens = example.main()
    finally:
        example.thunder.jit = jit
    transform = jitted_modules[0]._lc_transforms[0]
    assert len(transform.compiled) == len(example.LENGTHS), "there must be one set of traces for each padded length"
    torch.manual_seed(1 + rank)
    batches = [torch.randint(0, 256, (4, length)) for length in (10, 16, 25, 32)]
    with tfs.eager(jitted_modules[0]) as module, torch.no_grad():
        logits = [module(tokens)[:, :-1].flatten(0, 1) for tokens in batches]
    targets = [tokens[:, 1:].flatten() for tokens in batches]
    loss_of = partial(torch.nn.functional.cross_entropy, reduction="sum")
    total = torch.tensor([sum(map(loss_of, logits, targets)), sum(map(len, targets))])
    torch.distributed.all_reduce(total)
    assert math.isclose(loss, (total[0] / total[1]).item(), rel_tol=1e-5)
    assert len(set(everywhere(loss))) == 1
    first, second = everywhere(tokens[0].tolist())
    assert len(first) == len(second) == 8
    assert first != second, "each rank must have its own prompt"


@on_ranks(4)
def test_the_inference_process_has_the_logits_of_the_trained_model() -> None:
    example = load("stream_weights")
    *trained, server = everywhere(example.main())
    assert all(torch.equal(logits, server) for logits in trained)
    torch.manual_seed(0)
    initial = example.Sequential(
        torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)
    )
    assert not torch.allclose(initial(torch.arange(8).unsqueeze(0)), server, atol=1e-2)


def test_plan_compares_strategies_on_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("plan")
    tokens = torch.zeros((8, 512), dtype=torch.int64, device="meta")
    shape = SimpleNamespace(blocks=8, width=1024, length=512)
    example.make = lambda: (linear_gpt(shape, "meta"), (tokens, tokens))  # attention takes long to compile
    steps: dict[str, DryRun] = example.main()
    assert capsys.readouterr().out.count("of communication exposed") == 2
    assert steps["zero3"].after.peak_unsharded_bytes < steps["zero2"].after.peak_unsharded_bytes
    for step in steps.values():
        assert step.after.step_seconds <= step.before.step_seconds


def test_plan_llama_says_for_each_number_of_ranks_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    load("plan_llama").main(64, 1)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " ms a step: fits on H100" in line] == [
        "8",
        "64",
        "512",
        "8",
    ]


@on_ranks()
def test_a_loss_in_chunks_gathers_the_head_once_and_needs_less_than_half_of_the_memory() -> None:
    example = load("chunked_loss")
    example.VOCABULARY = 1024  # logits still need most of the memory
    (whole, unchunked), (chunked, compiled) = example.main(chunks=1), example.main(chunks=3)
    assert torch.allclose(torch.tensor(chunked), torch.tensor(whole), rtol=1e-5)
    gathers = [
        [b.args[0].spec.name for b in t.bound_symbols if b.sym.name == "fsdp_all_gather"] for t in compiled.traces
    ]
    assert [of_trace.count("head") for of_trace in gathers] == [1, 1]
    assert compiled.memory.peak.nbytes < unchunked.memory.peak.nbytes / 2


@on_ranks()
def test_ranks_that_differ_end_together_with_the_weights_of_one_process() -> None:
    steps, difference = load("ranks_differ").main(check=True)
    assert steps == 8
    assert difference < 1e-9


def from_scratch() -> ModuleType:
    with warnings.catch_warnings():
        return load("from_scratch")


def test_from_scratch_is_short_and_starts_without_this_package() -> None:
    script = FOLDER / "from_scratch.py"
    tree = ast.parse(script.read_text())
    imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    own = {path.stem for path in FOLDER.glob("*.py")} | {"thunder_fsdp_sched"}
    assert not own & {name.partition(".")[0] for name in imported}
    assert len(script.read_text().splitlines()) <= 400
    if not profiles.LONG:
        return
    # A process without the stand-ins of `compat`: the script must bring its own.
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    expected = "Start two processes" if hasattr(torch.autograd.Function.apply, "__func__") else "needs torch 2.10 to"
    assert run.returncode == 1 and expected in run.stderr, run.stderr


@pytest.mark.long  # it uses nothing of the package, so that only other versions can break it
@on_ranks()
def test_from_scratch_trains_like_the_unsharded_model_with_overlap() -> None:
    example = from_scratch()
    transform, difference = example.train(steps=2)
    assert difference == 0
    assert len(transform.collectives.finished) == 2 * 11
    for steps, least in zip(transform.schedules, (0.9, 0.95), strict=True):
        beside = [bool(in_flight) for what, in_flight in steps if not what]
        assert sum(beside) > least * len(beside)


@on_ranks(4)
def test_experts_in_parallel_within_a_leaf_have_the_gradients_of_one_process() -> None:
    load("expert_parallel").main(check=True)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_the_training_example_trains(tmp_path: Path) -> None:
    result = run_python(*TORCHRUN, FOLDER / "train.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "fsdp_all_gather" in result.stdout
    assert torch.load(tmp_path / "weights.pt")["0.weight"].shape == (256, 64)


def test_the_restartable_example_finishes_after_kills_while_it_saves(tmp_path: Path) -> None:
    """Each start of the script but the last dies at another point, and torchrun restarts it."""
    script = (FOLDER / "resume.py").read_text()
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
    slot, x = torch.empty(2, 8, 8), torch.ones(2, 8)
    with StepCounter(shards) as counter:
        with counter.phase("shared slots"):
            dist.all_gather_into_tensor(slot[0], shards[0])
            dist.all_gather_into_tensor(slot[1], shards[1])
            x @ slot[0]
            dist.all_gather_into_tensor(slot[0], shards[2])
            x @ slot[1]
            x @ slot[0]
        with counter.phase("a gradient in the place of a parameter"):
            dist.all_gather_into_tensor(slot[0], shards[0])
            x @ slot[0]
            dist.all_gather_into_tensor(slot[1], shards[1])
            torch.mm(torch.ones(8, 2), x, out=slot[0])  # overwrites the slot without reading it
        with counter.phase("memory held"):
            fresh = [torch.empty(8, 8) for _ in shards]
            for whole, shard in zip(fresh, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard)
            x @ fresh[0]
        del whole, fresh
        with counter.phase("memory freed"):
            x + 1
    assert list(counter.counts().peak_unsharded_bytes.values()) == [2 * 256, 256, 3 * 256, 0]


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
