"""The command ``bench``: a user's model beside FSDP2 and DDP, on two gloo ranks."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched.extras import bench_systems
from thunder_fsdp_sched.extras.command_line import app

import pytest
import torch
import torch.distributed as dist
from coded import coded
from forked import run_python
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thunder_fsdp_sched"]
Inputs = tuple[torch.Tensor, ...]


class Net(nn.Module):
    """Blocks after a layer, with a parameter without dimensions if ``scaled``, and an output times ``factor``."""

    def __init__(self, *, scaled: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(2.0)) if scaled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * (self.factor if self.scale is None else self.scale)


def make() -> tuple[nn.Module, Inputs]:
    return Net(), (torch.randn(3, 4),)


def make_scaled() -> tuple[nn.Module, Inputs]:
    return Net(scaled=True), (torch.randn(3, 4),)


_calls = itertools.count()


def make_another_each_time() -> tuple[nn.Module, Inputs]:
    return Net(factor=30 * (1 + 0.001 * next(_calls))), (torch.randn(3, 4),)


def make_on_meta() -> tuple[nn.Module, Inputs]:
    with torch.device("meta"):
        return make()


def make_frozen() -> tuple[nn.Module, Inputs]:
    return Net().requires_grad_(False), (torch.randn(3, 4),)


def make_nothing() -> nn.Module:
    return Net()


def make_on_one_rank() -> tuple[nn.Module, Inputs]:
    if dist.get_rank() == 1:
        raise ValueError("no data here")
    return make()


def invoke(factory: Callable[[], Any], *options: str) -> Any:
    """Run the command in this process, which is one of the ranks."""
    result = CliRunner().invoke(
        app, ["bench", f"test_bench:{factory.__name__}", "--rounds", "1", *options], env={"COLUMNS": "200"}
    )
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    gc.collect()
    gc.freeze()  # as the workers had it
    return result


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table but its name."""
    found = re.findall(rf"^ *({'|'.join(bench_systems.SYSTEMS)}|broken) +(.*?) *$", output, re.MULTILINE)
    return {name: re.split(r" {2,}", cells) for name, cells in found}


def test_the_documented_command_prints_a_row_for_each_system(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))\n"
        "    return model, (torch.randn(3, 4),)\n"
    )
    command = [*TORCHRUN, "bench", "my_models:make", "--rounds", "2", "--steps", "2"]
    result = run_python(
        "-W", "ignore", *command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1", "COLUMNS": "80"}, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"my_models:make: torch {torch.__version__}, CPU, 1 thread a rank, 2 ranks, gloo" in result.stdout
    rows = rows_of(result.stdout)
    assert list(rows) == list(bench_systems.SYSTEMS)
    for name, cells in rows.items():
        assert len(cells) == (5 if name.startswith("ours") else 3), result.stdout  # bytes are known of ours alone
    assert rows["FSDP2 zero3"][1] == "1.00" and "failed" not in result.stdout
    assert result.stdout.count("Medians of 2 rounds of 2 steps") == 1  # rank 0 alone prints


@on_ranks(2)
def test_a_system_that_refuses_the_model_is_a_row_that_says_why(rank: int) -> None:
    result = invoke(make_scaled, "--systems", "ours zero3, FSDP2 zero2, DDP")
    assert result.exit_code == 0, result.output
    if rank == 0:
        rows = rows_of(result.stdout)
        assert len(rows["ours zero3"]) == 4 and len(rows["DDP"]) == 2, result.stdout  # there is no FSDP2 to divide by
        assert rows["FSDP2 zero2"][0].startswith("fully_shard doesn't support scalar parameters")


_ended: list[str] = []
"""The errors of ranks that have waited for another one."""


def fails_while_another_rank_waits(module: nn.Module, group: Any, setup: Any) -> Any:
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    with pytest.raises(RuntimeError) as ended:
        dist.all_reduce(torch.ones(1), group=group)
    assert "Timed out" not in str(ended.value), ended.value  # after the 5 minutes of the group
    _ended.append(str(ended.value))
    raise ended.value


@on_ranks(2)
def test_a_system_that_fails_on_one_rank_holds_up_no_other(rank: int) -> None:
    _ended.clear()
    fsdp2, sharded = bench_systems.SYSTEMS["FSDP2 zero3"], []

    def recorded(*args: Any) -> Any:
        module, others = fsdp2(*args)
        sharded.extend(name for name, part in module.named_modules() if isinstance(part, FSDPModule))
        return module, others

    systems = {"broken": fails_while_another_rank_waits, "FSDP2 zero3": recorded}
    with mock.patch.dict(bench_systems.SYSTEMS, systems):
        result = invoke(make, "--systems", "broken, FSDP2 zero3, DDP")
        assert result.exit_code == 0, result.output
        assert invoke(make, "--systems", "broken").exit_code == 1  # nothing was measured
    assert len(_ended) == 2 * (rank == 0)
    assert sharded == ["", "blocks.0", "blocks.1"]  # those that have buckets
    if rank == 0:
        rows = rows_of(result.stdout)
        assert rows["broken"] == ["rank 1: RuntimeError: out of luck"]
        assert len(rows["FSDP2 zero3"]) == 3 and len(rows["DDP"]) == 3, result.stdout
    else:
        assert "in fails_while_another_rank_waits" in result.stderr  # where it failed


@on_ranks(2)
def test_systems_whose_losses_differ_more_than_their_precision_are_not_measured(rank: int) -> None:
    low = invoke(make_another_each_time, "--systems", "FSDP2 zero3,FSDP2 zero2", "--mixed-precision", "bfloat16")
    assert low.exit_code == 0, low.output
    result = invoke(make_another_each_time, "--systems", "FSDP2 zero3,DDP,FSDP2 zero2")
    assert result.exit_code == 1
    if rank == 0:
        assert re.search(r"Losses on rank 0 .* FSDP2 zero3 \d.*, DDP \d", " ".join(result.stdout.split()))
        assert "do not compute the same" in result.stdout and "exposed" not in result.stdout
        assert "off by more than 0.001: " in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("test_bench:make_nothing", "'make_nothing' must return (module, args) or (module, args, kwargs)"),
        ("test_bench:no_such", "model: 'test_bench:no_such' cannot be imported"),
        ("test_bench:make_on_meta", "model: 'first.weight' is on the meta device"),
        ("test_bench:make_frozen", "model: no parameter requires a gradient"),
        ("test_bench:make_on_one_rank", "rank 1: no data here"),
    ],
)
@on_ranks(2)
def test_what_the_factory_does_wrong_is_one_error(factory: str, reason: str, rank: int) -> None:
    result = CliRunner().invoke(app, ["bench", factory])
    assert result.exit_code == 2, result.output
    assert (reason in result.stderr) == (rank == 0), result.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "bench: it runs on several ranks; start it with torchrun"),
        (["--systems", "FSDP3"], "systems: no system 'FSDP3'; name some of ours zero3, "),
        (["--prefetch", "far"], "--prefetch: expected a number of buckets or auto, got 'far'"),
        (["--transport", "pigeon"], "transport: "),
        (["--mixed-precision", "float7"], "mixed-precision: torch has no dtype 'float7'"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_options_are_errors_on_any_number_of_ranks(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = CliRunner().invoke(app, ["bench", "test_bench:make", *options], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split()), result.output


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "COLUMNS": "400"}
    result = CliRunner().invoke(app, ["bench", "test_bench:make"], env=env)
    assert result.exit_code == 2
    assert "nproc-per-node: 2 ranks, but only 1 GPUs" in " ".join(result.stderr.split()), result.output


def test_the_loss_is_the_first_scalar_or_made_of_all_tensors() -> None:
    scalar, vector = torch.tensor(3.0, requires_grad=True), torch.tensor([1.0, 3.0], requires_grad=True)
    assert bench_systems.loss_of({"loss": scalar, "logits": vector}) is scalar
    assert bench_systems.loss_of((vector, torch.ones(2), 2 * vector)).item() == 5 + 20
    with pytest.raises(ValueError, check=coded("bench.output-without-gradient")):
        bench_systems.loss_of(torch.ones(2))
