"""Lightning Fabric with ``FSDPSchedStrategy``, compared with the unsharded model."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched import Init
from thunder_fsdp_sched.testing import step_schedule

import pytest
import ranks
import thunder
import torch
import torch.distributed as dist
import torch.nn.functional as F
from coded import coded
from forked import run_python
from models import Layer
from ranks import on_ranks
from saving import assert_equal, contents
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

STEPS, ACCUMULATED = 3, 2


def _installed() -> str | None:
    """Return the package of Fabric that the strategy uses, too."""
    for name in ("lightning.fabric", "lightning_fabric"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return name
    return None


PACKAGE = _installed()
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="neither lightning-fabric nor lightning is installed")


class GPT(nn.Module):
    """A model with the traits of LitGPT's (an unsaved buffer of positions, tied embeddings), and a 0-dim parameter."""

    def __init__(self, scale: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.wte = nn.Embedding(13, 8)
        self.h = nn.ModuleList(Layer(8) for _ in range(2))
        self.lm_head = nn.Linear(8, 13, bias=False)
        self.lm_head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.ones(scale))
        self.register_buffer("cos", torch.linspace(0, 1, 8).cos(), persistent=False)

    def reset_parameters(self) -> None:
        self.cos = torch.linspace(0, 1, 8, device=self.cos.device, dtype=self.cos.dtype).cos()
        nn.init.ones_(self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte.forward(tokens) * self.scale
        for block in self.h:
            x = block(x * self.cos)
        return self.lm_head.forward(x)

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens).argmax(-1)


@contextlib.contextmanager
def launched(
    rank: int, world_size: int, *, strategy: Any = None, fabric_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[Any]:
    """Yield a ``Fabric`` in processes that have a process group, as under torchrun; ``options`` are those of ours."""
    strategy = strategy or importlib.import_module("thunder_fsdp_sched.fabric").FSDPSchedStrategy(**options)
    with ranks.launched(rank, world_size):
        fabric = importlib.import_module(PACKAGE).Fabric(
            accelerator="cpu", devices=world_size, strategy=strategy, **(fabric_options or {})
        )
        fabric.launch()
        yield fabric


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(13, (2, 6), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def mean_gradients(model: nn.Module, world_size: int) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world_size


def assert_same(model: Any, reference: nn.Module) -> None:
    torch.testing.assert_close(tfs.full_state_dict(model), dict(reference.state_dict()), rtol=1e-10, atol=1e-12)


@on_ranks()
def test_models_train_like_unsharded_with_accumulation_and_clipping(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with launched(rank, world_size, sharding_strategy="zero3") as fabric:
        model = GPT().double()
        reference = copy.deepcopy(model)
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
        assert all(hasattr(param, "to_local") for param in model.parameters())
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
        clips = ({"max_norm": 0.1}, {"clip_val": 0.01}, {"max_norm": 0.05, "norm_type": float("inf")})
        for step in range(STEPS):
            for part in range(ACCUMULATED):
                with fabric.no_backward_sync(model, enabled=part < ACCUMULATED - 1):
                    loss = loss_of(model, rank, 10 * step + part)
                    expected = loss_of(reference, rank, 10 * step + part)
                    torch.testing.assert_close(loss, expected)
                    fabric.backward(loss)
                    expected.backward()
                    assert (part == ACCUMULATED - 1) == any(p.grad is not None for p in model.parameters()), part
            mean_gradients(reference, world_size)
            norm = fabric.clip_gradients(model, optimizer, **clips[step])
            if "clip_val" in clips[step]:
                nn.utils.clip_grad_value_(reference.parameters(), clips[step]["clip_val"])
            else:
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), **clips[step]))
                assert norm > clips[step]["max_norm"], "nothing was clipped"
            optimizer.step()
            optimizer.zero_grad()
            theirs.step()
            theirs.zero_grad()
            assert_same(model, reference)
        _functions_take_the_wrapper(model, optimizer, reference)
        with pytest.raises(RuntimeError, check=coded("fabric.forward-replaced-after-setup")):
            model.mark_forward_method("predict")
            model.predict(torch.zeros(2, 6, dtype=torch.long))
        loss_of(model, rank, 0)  # goes on
        assert fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == 1
        fabric.barrier()


def _functions_take_the_wrapper(model: Any, optimizer: Any, reference: nn.Module) -> None:
    """Call this package's functions with what ``fabric.setup`` returns."""
    tokens = torch.zeros(2, 6, dtype=torch.long)
    with tfs.eager(model, reshard_after_forward=False) as module, torch.no_grad():
        torch.testing.assert_close(module(tokens), reference(tokens))
    assert tfs.get_model_state_dict(model).keys() == reference.state_dict().keys()
    names = {name for name, _ in reference.named_parameters()}
    assert tfs.get_optimizer_state_dict(model, optimizer)["state"].keys() == names
    assert step_schedule(model).backward is not None
    tfs.discard_unreduced(model)
    loss_of(model, 0, 0).backward()
    assert tfs.clip_grad_norm_(model, 1.0) > 0
    optimizer.zero_grad()


def step_without_loss(model: Any, optimizer: Any) -> None:
    """Run a step with gradients that follow from the parameters, which needs no compiling."""
    for param in model.parameters():
        param.grad = param.detach() / 10
    optimizer.step()
    optimizer.zero_grad()


def _trained(fabric: Any, module: nn.Module) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer after a step."""
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    step_without_loss(model, optimizer)
    return model, optimizer


class Counter:
    """An object with a state, such as a data loader that can resume."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _fresh(fabric: Any, scale: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Return a model created on the meta device, and its optimizer; all differ from those of the test."""
    torch.manual_seed(1)
    with fabric.init_module(empty_init=True):
        model = GPT(scale=scale)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    module = fabric.setup_module(model.double())
    return module, fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.5))


@on_ranks()
def test_checkpoints_are_saved_and_loaded_as_folders_and_as_files(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with launched(rank, world_size) as fabric:
        model, optimizer = _trained(fabric, GPT().double())
        expected = contents(model, optimizer)
        for kind in ("sharded", "full"):
            fabric.strategy.state_dict_type = kind
            path = tmp_path / kind
            saved = {"model": model, "optimizer": optimizer, "iteration": 3, "loader": Counter(5), "name": "first"}
            saved["stateless"] = fabric.setup_dataloaders(DataLoader([1, 2]))
            fabric.save(path, saved | {"iteration": 2})
            fabric.save(path, saved)  # takes the place of the first
            assert path.is_dir() == (kind == "sharded")
            new, new_optimizer = _fresh(fabric)
            state = {"model": new, "optimizer": new_optimizer, "iteration": 0, "loader": Counter(0)}
            state["stateless"] = saved["stateless"]
            assert fabric.load(path, state) == {"name": "first"}
            assert state["iteration"] == 3 and state["loader"].value == 5
            assert_equal(contents(new, new_optimizer), expected)
            with pytest.raises(KeyError, check=coded("fabric.strict-entry-missing", "epoch")):
                fabric.load(path, {"model": new, "epoch": 0})
            assert fabric.load(path, {"model": new, "epoch": 0}, strict=False)["iteration"] == 3
        tfs.save_checkpoint(model, tmp_path / "direct", optimizer)
        new, new_optimizer = _fresh(fabric)
        tfs.load_checkpoint(new, tmp_path / "direct", new_optimizer)
        assert_equal(contents(new, new_optimizer), expected)
        tfs.save_safetensors(model, tmp_path / "safetensors")
        new, _ = _fresh(fabric)
        tfs.load_safetensors(new, tmp_path / "safetensors")
        assert_equal(contents(new), contents(model))
        _several_optimizers_are_saved_together(fabric, tmp_path, model)
        _files_are_those_of_unsharded_runs(fabric, tmp_path, expected)
        with pytest.raises(ValueError, check=coded("fabric.expected-one-module")):
            fabric.save(tmp_path / "nothing", {"optimizer": optimizer})
        with pytest.raises(tfs.CheckpointError, check=coded("checkpoint.file-not-readable", "nothing")):
            fabric.load(tmp_path / "nothing", {"model": model})


def _several_optimizers_are_saved_together(fabric: Any, folder: Path, model: Any) -> None:
    def optimizers(model: Any) -> dict[str, Any]:
        blocks = [param for name, param in model.named_parameters() if ".h." in name]
        others = [param for name, param in model.named_parameters() if ".h." not in name]
        whole = tfs.WholeParameters(torch.optim.SGD, model, blocks, lr=0.1, momentum=0.9)
        return {"blocks": fabric.setup_optimizers(whole), "others": fabric.setup_optimizers(torch.optim.AdamW(others))}

    fabric.strategy.state_dict_type = "sharded"
    first = optimizers(model)
    for param in model.parameters():
        param.grad = param.detach().clone()
    [group] = first["others"].param_groups
    expected = sum(param.full_tensor().square().sum() for param in group["params"]).sqrt()
    torch.testing.assert_close(fabric.clip_gradients(model, first["others"], max_norm=0.1), expected.detach())
    assert torch.equal(model.h[0].up.bias.grad.full_tensor(), model.h[0].up.bias.full_tensor()), "of the other"
    for optimizer in first.values():
        step_without_loss(model, optimizer)
    fabric.save(folder / "several", {"model": model, **first})
    new, _ = _fresh(fabric)
    second = optimizers(new)
    fabric.load(folder / "several", {"model": new, **second})
    for optimizer in (*first.values(), *second.values()):
        step_without_loss(new if optimizer in second.values() else model, optimizer)
    assert_equal(contents(new), contents(model))
    fabric.strategy.state_dict_type = "full"
    with pytest.raises(NotImplementedError, check=coded("fabric.state-needs-sharded")):
        fabric.save(folder / "several", {"model": model, **first})


def _files_are_those_of_unsharded_runs(fabric: Any, folder: Path, expected: dict[str, Any]) -> None:
    content = torch.load(folder / "full")
    assert content["model"]["wte.weight"].data_ptr() == content["model"]["lm_head.weight"].data_ptr()
    reference = GPT().double()
    reference.load_state_dict(content["model"])
    [group] = content["optimizer"]["param_groups"]
    assert group["params"] == [name for name, _ in reference.named_parameters()]
    if fabric.global_rank == 0:
        state = {number: content["optimizer"]["state"][name] for number, name in enumerate(group["params"])}
        numbered = {"state": state, "param_groups": [{**group, "params": list(state)}]}  # as an optimizer's own
        torch.save({"model": reference.state_dict(), "optimizer": numbered}, folder / "unsharded")
        torch.save(reference.state_dict(), folder / "raw")
    fabric.barrier()
    new, optimizer = _fresh(fabric)
    fabric.load(folder / "unsharded", {"model": new, "optimizer": optimizer})
    assert_equal(contents(new, optimizer), expected)
    new, optimizer = _fresh(fabric)
    fabric.load_raw(folder / "raw", new)
    assert_equal(contents(new), {name: expected[name] for name in contents(new)})
    fabric.save(folder / "some", {"model": new}, filter={"model": lambda name, value: value.ndim == 2})
    blocks = [f"h.{block}.{layer}.weight" for block in range(2) for layer in ("up", "down")]
    matrices = ["wte.weight", *blocks, "lm_head.weight"]
    assert list(torch.load(folder / "some")["model"]) == matrices
    numbered = {"state": {99: {"step": 1}}, "param_groups": []}
    for content, code in (
        ([1], "fabric.file-not-dictionary"),
        ({"model": {}}, "fabric.entry-missing"),
        ({"model": {}, "optimizer": numbered}, "fabric.too-many-parameters-saved"),
    ):
        if fabric.global_rank == 0:
            torch.save(content, folder / code)
        fabric.barrier()
        with pytest.raises(tfs.CheckpointError, check=coded(code)):
            fabric.load(folder / code, {"model": new, "optimizer": optimizer})
    with pytest.raises(tfs.CheckpointError, check=coded("fabric.path-is-folder", folder)):
        fabric.save(folder, {"model": new})


@on_ranks()
def test_fsdp2_under_fabric_reads_our_folders_and_we_read_its_own(rank: int, world_size: int, tmp_path: Path) -> None:
    strategies = importlib.import_module(f"{PACKAGE}.strategies")
    torch.manual_seed(0)
    with launched(rank, world_size) as fabric:
        model, optimizer = _trained(fabric, GPT(scale=(1,)).double())  # FSDP2 refuses 0-dim parameters
        fabric.save(tmp_path / "ours", {"model": model, "optimizer": optimizer, "iteration": 4})
        before = contents(model)
        step_without_loss(model, optimizer)
        expected = contents(model, optimizer)
    strategy = strategies.ModelParallelStrategy(
        lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]),
        data_parallel_size=world_size,
        tensor_parallel_size=1,
    )
    with launched(rank, world_size, strategy=strategy) as fabric:
        peer = fabric.setup_module(GPT(scale=(1,)).double())
        peer_optimizer = fabric.setup_optimizers(torch.optim.AdamW(peer.parameters(), lr=0.5))
        state = {"model": peer, "optimizer": peer_optimizer, "iteration": 0}
        fabric.load(tmp_path / "ours", state)
        assert state["iteration"] == 4
        for name, param in peer.named_parameters():
            torch.testing.assert_close(param.full_tensor(), before[name.partition(".")[2]])
        step_without_loss(peer, peer_optimizer)
        fabric.save(tmp_path / "theirs", state)
    with launched(rank, world_size) as fabric:
        new, new_optimizer = _fresh(fabric, scale=(1,))
        fabric.load(tmp_path / "theirs", {"model": new, "optimizer": new_optimizer})
        loaded = contents(new, new_optimizer)
        assert loaded.keys() == expected.keys() and loaded["group 0"]["lr"] == 0.05
        for name, value in loaded.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[name])


@on_ranks()
def test_modules_are_initialized_from_meta_and_converted_to_a_precision(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        expected = GPT()
    expected.to_empty(device="cpu")
    expected.lm_head.weight = expected.wte.weight
    for module in expected.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(0)
    with launched(rank, world_size) as fabric:
        with fabric.init_module(empty_init=True):
            model = GPT()
        model = fabric.setup(model)
        assert_same(model, expected)
        assert all(map(torch.equal, model.buffers(), expected.buffers()))
    for mesh, size in (((2, 1), 1), ((1, 2), 2)):
        with launched(rank, world_size, ranks=mesh) as fabric:
            bucket = fabric.setup(nn.Linear(2, 2))._forward_module._lc_transforms[0].plan.buckets[0]
            assert (bucket.replicas, bucket.layout.world_size) == (world_size // size, size)
    with (
        launched(rank, world_size, ranks=(2, 2)) as fabric,
        pytest.raises(ValueError, check=coded("fabric.ranks-do-not-match", "(2, 2)", "4")),
    ):
        fabric.setup(nn.Linear(2, 2))
    for precision, stored, computed in (
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("16-mixed", torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ):
        _train_in(rank, world_size, precision, stored, computed)


def _train_in(rank: int, world_size: int, precision: str, stored: torch.dtype, computed: torch.dtype) -> None:
    given: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on a CPU Fabric itself would take bf16-mixed
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        given = {"plugins": importlib.import_module(f"{PACKAGE}.plugins").MixedPrecision(precision, "cpu", scaler)}
    torch.manual_seed(2)
    with launched(rank, world_size, fabric_options=given) as fabric:
        with fabric.init_module():
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        if precision == "16-mixed":
            assert isinstance(fabric.strategy.precision.scaler, ShardedGradScaler)
            assert fabric.strategy.precision.scaler.get_scale() == 1024
        output = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)))
        assert output.dtype is torch.float32
        assert {param.dtype for param in model.parameters()} == {stored}
        [bucket] = model._forward_module._lc_transforms[0].plan.buckets[:1]
        assert bucket.param_dtype == computed
        fabric.backward(output.square().mean())
        unscaled = sum(param.grad.full_tensor().float().square().sum() for param in model.parameters()).sqrt()
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
        torch.testing.assert_close(norm.float() * (1024 if precision == "16-mixed" else 1), unscaled, rtol=0.03, atol=0)
        before = contents(model)
        optimizer.step()
        assert all(not torch.equal(value, before[name]) for name, value in contents(model).items())


def test_invalid_options_raise_errors_before_the_launch() -> None:
    from thunder_fsdp_sched.fabric import FSDPSchedStrategy

    from torch.distributed.fsdp import MixedPrecisionPolicy

    package = importlib.import_module(PACKAGE)
    for options, error, expected in (
        ({"state_dict_type": "whole"}, ValueError, coded("fabric.unknown-state-dict-type", "'whole'")),
        ({"init": Init(device="cpu")}, TypeError, coded("fabric.device-in-init")),
        ({"init": "cpu"}, TypeError, coded("option.wrong-type", "init: ", "Init(...)", "'cpu' of type str")),
        ({"ranks": (2, 0)}, TypeError, coded("fabric.ranks-not-a-mesh", "(2, 0)")),
        ({"prefetch": -1}, ValueError, coded("option.too-small", "prefetch", "-1")),
    ):
        with pytest.raises(error, check=expected):
            FSDPSchedStrategy(**options)
    with pytest.raises(ValueError, check=coded("fabric.two-precision-policies", "bf16-mixed")):
        strategy = FSDPSchedStrategy(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        package.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    strategy = pickle.loads(pickle.dumps(FSDPSchedStrategy(prefetch=2)))  # as for start_method="spawn"
    assert isinstance(strategy, FSDPSchedStrategy) and isinstance(strategy, package.strategies.Strategy)
    with pytest.raises(TypeError, check=coded("fabric.unknown-precision-plugin", "Own")):
        precision = importlib.import_module(f"{PACKAGE}.plugins").Precision
        strategy.precision = type("Own", (precision,), {})()
    with pytest.raises(TypeError, check=coded("fabric.module-already-jitted")):
        strategy.setup_module(thunder.jit(nn.Linear(2, 2)))


def test_the_example_trains_in_processes_that_fabric_starts_and_resumes(tmp_path: Path) -> None:
    script = (Path(__file__).resolve().parents[1] / "examples" / "fabric.py").read_text()
    assert "_ in range(2)" in script
    (tmp_path / "fabric_example.py").write_text(
        script.replace("lightning_fabric", PACKAGE).replace("_ in range(2)", "_ in range(1)")
    )
    first = run_python("-W", "ignore", "fabric_example.py", "checkpoints", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    losses = [float(line.rpartition(" ")[2]) for line in first.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0] < 1
    weights = torch.load(tmp_path / "checkpoints" / "model.pt")["model"]
    assert weights["0.weight"].shape == (256, 64) and not any(hasattr(w, "to_local") for w in weights.values())
    second = run_python("-W", "ignore", "fabric_example.py", "checkpoints", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "step" not in second.stdout, "it must go on with step 20, which is the last"
    again = torch.load(tmp_path / "checkpoints" / "model.pt")["model"]
    assert all(torch.equal(weights[name], value) for name, value in again.items())
