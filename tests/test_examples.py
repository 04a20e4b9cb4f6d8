"""The scripts in ``examples/`` that no other file runs.

``test_demo`` runs ``train.py`` and ``resume.py``, ``test_fabric`` runs ``fabric.py``, ``test_testing`` runs
``test_schedule.py``, and ``real_models/test_huggingface.py`` runs ``huggingface.py`` and ``trainer.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched.planning import DryRun

import profiles
import pytest
import torch
from models import linear_gpt
from ranks import on_ranks
from scenario import everywhere

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
