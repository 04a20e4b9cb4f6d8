"""State dicts, sharded and unsharded: saving, loading, and entries that are refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import eager, fsdp, full_state_dict, get_optimizer_state_dict
from thunder_fsdp_sched.checkpoint import RowPiece
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor, local_rows

import pytest
import thunder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Layer, Model
from ranks import Ranks
from reference import Twins, loss_of
from torch import nn
from torch.distributed.tensor import DTensor


class Everything(Model):
    """A model with every kind of parameter (root, 0-dim, uneven, frozen, tied) and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("offset", torch.randn(4))
        self.register_buffer("unsaved", torch.randn(4), persistent=False)
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[1].up.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.offset + self.unsaved
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm(x)) + torch.tanh(x @ self.embedding.weight.t() @ self.mix)[:, :1]


def _make_twins(rank: int, world_size: int, seed: int = 0, **options: Any) -> Twins:
    torch.manual_seed(seed)
    return Twins(rank, world_size, Everything().double(), **options)


def _addresses(module: nn.Module) -> dict[str, int]:
    return {name: local_rows(param).data_ptr() for name, param in module.named_parameters()}


def _save_and_load_shards(rank: int, world_size: int) -> None:
    twins = _make_twins(rank, world_size)
    addresses = _addresses(twins.sharded)
    twins.train(steps=1)
    models = (twins.sharded, twins.reference)
    saved = [copy.deepcopy(model.state_dict()) for model in models]
    saved_optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
    assert "unsaved" not in saved[0] and "norm.running_mean" in saved[0]
    for param in twins.transform.plan["blocks.0"].params:
        assert saved[0][param.name].shape == param.shape

    twins.train(steps=2)
    for model, state in zip(models, saved, strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(twins.optimizers, saved_optimizers, strict=True):
        optimizer.load_state_dict(state)
    assert _addresses(twins.sharded) == addresses
    twins.check_parameters()
    twins.train(steps=2)


def test_training_continues_from_a_loaded_sharded_state_dict(ranks: Ranks) -> None:
    ranks.run(_save_and_load_shards)


def _check_full_state_dict(rank: int, world_size: int) -> None:
    twins = _make_twins(rank, world_size, move_state_dict_to_cpu=True)
    before = twins.reference.state_dict()
    unsharded = full_state_dict(twins.sharded)
    assert list(unsharded) and set(unsharded) == set(before)
    for name, value in unsharded.items():  # bit equal before any training
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        assert value.device.type == "cpu" and not value.requires_grad

    original = twins.sharded.original_state_dict()
    assert {name.removeprefix(".") for name in original} <= set(before)
    for name, value in original.items():
        torch.testing.assert_close(value, before[name.removeprefix(".")], rtol=0, atol=0)

    twins.train(steps=2)
    for name, value in unsharded.items():
        shares = value.untyped_storage().data_ptr() in {
            b.shard.untyped_storage().data_ptr() for b in twins.transform.sharded.buckets
        }
        assert not shares, f"{name} must be a copy, not a view of the shards"
    fresh = Everything().double()
    fresh.load_state_dict(full_state_dict(twins.sharded), strict=True)
    for name, value in fresh.state_dict().items():
        twins.close(value, twins.reference.state_dict()[name], name)
    assert fresh.head.weight is fresh.embedding.weight


def test_full_state_dict_loads_into_the_unsharded_module(ranks: Ranks) -> None:
    ranks.run(_check_full_state_dict)


def _load_full_state_dict(rank: int, world_size: int) -> None:
    twins = _make_twins(rank, world_size)
    twins.train(steps=1)
    addresses = _addresses(twins.sharded)
    torch.manual_seed(7)
    other = Everything().double()
    twins.sharded.load_original_state_dict(other.state_dict())
    twins.reference.load_state_dict(other.state_dict())
    assert _addresses(twins.sharded) == addresses
    assert twins.sharded.get_parameter("head.weight") is twins.sharded.get_parameter("embedding.weight")
    twins.check_parameters()
    twins.train(steps=2)

    # The state dict of one sharded module loads into another, in any dtype.
    again = _make_twins(rank, world_size, seed=9)
    again.sharded.load_original_state_dict(twins.sharded.original_state_dict())
    for name, value in full_state_dict(again.sharded).items():
        torch.testing.assert_close(value, full_state_dict(twins.sharded)[name], rtol=0, atol=0)
    again.sharded.load_original_state_dict({name: value.float() for name, value in other.state_dict().items()})
    for name, value in full_state_dict(again.sharded).items():
        torch.testing.assert_close(value, other.state_dict()[name].float().to(value.dtype), rtol=0, atol=0)
    assert all(p.dtype is torch.float64 for p in again.sharded.parameters())


def test_training_continues_from_a_loaded_unsharded_state_dict(ranks: Ranks) -> None:
    ranks.run(_load_full_state_dict)


def _load_some_entries(rank: int, world_size: int) -> None:
    twins = _make_twins(rank, world_size)
    before = full_state_dict(twins.sharded)
    some_entries = {
        "head.weight": torch.full((5, 4), 2.0),
        "scale": torch.tensor(3.0),
        "blocks.0.up.bias": torch.ones(8),
    }
    twins.sharded.load_original_state_dict(some_entries)
    after = full_state_dict(twins.sharded)
    for name, value in after.items():
        tied = "head.weight" if name == "embedding.weight" else name
        twins.close(value, some_entries[tied].double() if tied in some_entries else before[name], name)


def test_loading_some_unsharded_entries_leaves_the_others_unchanged(ranks: Ranks) -> None:
    ranks.run(_load_some_entries)


def _load_wrong_shape(rank: int, world_size: int) -> None:
    twins = _make_twins(rank, world_size)
    state = {**twins.reference.state_dict(), "mix": torch.zeros(4, 5)}
    with pytest.raises(RuntimeError, match=r"size mismatch for mix: the unsharded .* \(5, 4\), the entry \(4, 5\)"):
        twins.sharded.load_original_state_dict(state)
    with pytest.raises(RuntimeError, match=r"load_original_state_dict: the module has no 'other'"):
        twins.sharded.load_original_state_dict({"other": torch.zeros(1)})
    shard = {**twins.sharded.state_dict(), "mix": torch.zeros(9, 9)}
    with pytest.raises(RuntimeError, match="size mismatch for mix"):
        twins.sharded.load_state_dict(shard)


def test_entries_of_the_wrong_shape_are_refused_by_name(ranks: Ranks) -> None:
    ranks.run(_load_wrong_shape)


def _replace_parameters(rank: int, world_size: int) -> None:
    model = Everything().double()
    sharded = thunder.jit(model, transforms=[fsdp(bucketing_strategy="none")])
    (x,) = model.inputs(torch.Generator().manual_seed(0))
    loss_of(sharded(x)).backward()

    def check_error_names(name: str) -> None:
        # Every rank raises, even one that has no rows of the parameter. No rank waits for the others.
        with pytest.raises(RuntimeError, match=rf"parameter '{name}' is no longer in the shard buffer.*p\.copy_"):
            sharded(x)

    for name in ("mix", "scale"):
        param = sharded.get_parameter(name)
        with pytest.raises(RuntimeError, match=rf"'{name}' cannot be given other memory.*p\.copy_"):
            param.data = param.data.clone()
        ours = param._local_tensor
        param._local_tensor = ours.clone()
        check_error_names(name)
        param._local_tensor = ours
        loss_of(sharded(x)).backward()
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\): 'scale' of a sharded model cannot be"):
        sharded.load_state_dict({name: value.clone() for name, value in sharded.state_dict().items()}, assign=True)


def test_the_error_names_a_replaced_parameter_on_every_rank(ranks: Ranks) -> None:
    ranks.run(_replace_parameters)


#
# Every entry of a sharded model's state dict knows its unsharded shape and its rows
#


class _WithSubmodule(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.own = nn.Linear(2, 2)


def _models(**options: Any) -> tuple[dict[str, nn.Module], nn.Module]:
    """Return the modules through which users can take a state dict, by prefix of the names, and an unsharded copy."""
    module = Everything().double()
    twin = copy.deepcopy(module)
    jitted = thunder.jit(module, transforms=[fsdp(**options)])
    lists = nn.ModuleList([module])
    return {"": jitted, "net.": _WithSubmodule(jitted), "0.": lists, "original": module, "part": module.blocks}, twin


def _model_entries(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the model's entries of a state dict, under the names of the unsharded module."""
    if prefix == "part":
        return {f"blocks.{name}": value for name, value in state.items()}
    prefix = "" if prefix == "original" else prefix
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _zero(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()


def _check_entries(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    models, twin = _models(**options)
    jitted, expected = models[""], twin.state_dict()
    locations = jitted._lc_transforms[-1].sharded.locations
    kinds = set()
    for prefix, owner in models.items():
        unsharded = {n: v for n, v in expected.items() if prefix != "part" or n.startswith("blocks.")}
        entries = _model_entries(owner.state_dict(), prefix)
        assert {n: v.shape for n, v in entries.items()} == {n: v.shape for n, v in unsharded.items()}
        for name in entries.keys() & locations.keys():
            kinds.add(type(entries[name]))
            rows = local_rows(entries[name])
            assert rows.numel() == 0 or rows.data_ptr() == local_rows(jitted.get_parameter(name)).data_ptr(), name

        # Save with code that knows nothing of this package: DCP, and pickle on each rank.
        dcp.save({"model": owner.state_dict()}, checkpoint_id=folder / prefix)
        sizes = dcp.FileSystemReader(folder / prefix).read_metadata().state_dict_metadata
        saved = _model_entries({n.removeprefix("model."): entry for n, entry in sizes.items()}, prefix)
        assert {n: entry.size for n, entry in saved.items()} == {n: v.shape for n, v in unsharded.items()}
        file = io.BytesIO()
        torch.save(owner.state_dict(), file)
        file.seek(0)
        copies = [copy.deepcopy(owner.state_dict()), torch.load(file, weights_only=False)]
        copies.append({name: value.clone().cpu() for name, value in owner.state_dict().items()})
        before = full_state_dict(jitted)
        loaded = before if prefix != "part" else {**_zeros(before), **_blocks(before)}
        for state in copies:
            _zero(jitted)
            owner.load_state_dict(state)
            _assert_equal(full_state_dict(jitted), loaded)
        _zero(jitted)
        state = {"model": owner.state_dict()}
        dcp.load(state, checkpoint_id=folder / prefix)
        _assert_equal(full_state_dict(jitted), loaded)
        owner.load_state_dict(state["model"])
        models["original"].load_state_dict(before)  # unsharded tensors
        _assert_equal(full_state_dict(jitted), before)
    assert kinds == {RowDTensor}


def _zeros(state: dict[str, Any]) -> dict[str, Any]:
    buffers = {name for name, _ in Everything().named_buffers()}
    return {name: value if name in buffers else torch.zeros_like(value) for name, value in state.items()}


def _blocks(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("blocks.")}


def _assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("options", [{}, {"transport": "coalesced"}], ids=["flat", "coalesced"])
def test_state_dict_entries_of_a_sharded_model_look_like_unsharded_parameters(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    ranks.run(_check_entries, tmp_path, options)


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for name, param in model.named_parameters():
        param.grad = torch.full_like(param, len(name))
    optimizer.step()
    optimizer.zero_grad()


def _whole_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = (value for state in optimizer.state_dict()["state"].values() for value in state.values())
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def _check_optimizer_entries(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    models, twin = _models(**options)
    jitted = models[""]
    names = [name for name, _ in jitted.named_parameters()]
    for case, make in (
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ):
        optimizer = make(list(jitted.parameters()))
        _step(jitted, optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        copies = [copy.deepcopy(optimizer.state_dict()), torch.load(file, weights_only=False)]
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=folder / case)
        saved = dcp.FileSystemReader(folder / case).read_metadata().state_dict_metadata
        for number, name in enumerate(names):
            for key, value in optimizer.state_dict()["state"][number].items():
                unsharded = twin.get_parameter(name).shape or (1,)
                assert saved[f"optim.state.{number}.{key}"].size == value.shape == (unsharded if value.ndim else ())
        before = full_state_dict(jitted)
        _step(jitted, optimizer)
        expected = full_state_dict(jitted), copy.deepcopy(_rows_of_state(optimizer))
        for again in (*copies, None):
            jitted.load_original_state_dict(before)
            other = make(list(jitted.parameters()))
            if again is None:  # in place, into the state of an optimizer that has made another step
                loaded = {"optim": optimizer.state_dict()}
                dcp.load(loaded, checkpoint_id=folder / case)
                again = loaded["optim"]
            other.load_state_dict(again)
            entries = get_optimizer_state_dict(jitted, other)["state"]
            assert {name: entries[name].keys() for name in names} == {n: again["state"][0].keys() for n in names}
            _step(jitted, other)
            _assert_equal(full_state_dict(jitted), expected[0])
            for ours, theirs in zip(_rows_of_state(other), expected[1], strict=True):
                _assert_equal(ours, theirs)

        # State with other rows, of another model's optimizer. Then parameters pickled without a state dict.
        stranger = thunder.jit(Everything().double(), transforms=[fsdp(transport="coalesced")])
        theirs = make(list(stranger.parameters()))
        _step(stranger, theirs)
        if options.get("transport") != "coalesced":
            optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for model, trained in ((stranger, theirs), (jitted, optimizer)):
                _step(model, trained)
            for ours, other in zip(*(_whole_states(o) for o in (optimizer, theirs)), strict=True):
                assert torch.equal(ours, other)
    with pytest.raises(TypeError, match=r"cannot be pickled: it holds this rank's rows\. Save model\.state_dict"):
        torch.save(dict(jitted.named_parameters()), io.BytesIO())


def _rows_of_state(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [
        {key: local_rows(value) for key, value in optimizer.state[param].items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.parametrize("options", [{}, {"transport": "coalesced"}], ids=["flat", "coalesced"])
def test_state_dict_entries_of_an_optimizer_look_like_unsharded_state(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    ranks.run(_check_optimizer_entries, tmp_path, options)


def _save_with_dcp_directly(rank: int, world_size: int, folder: Path) -> None:
    models, _ = _models()
    jitted = models[""]
    optimizer = torch.optim.AdamW(list(jitted.parameters()), lr=0.1)
    _step(jitted, optimizer)
    before = full_state_dict(jitted)
    dcp.save({"model": jitted, "optim": optimizer}, checkpoint_id=folder / "both")
    _step(jitted, optimizer)
    after = full_state_dict(jitted)
    _step(jitted, optimizer)
    dcp.load({"model": jitted, "optim": optimizer}, checkpoint_id=folder / "both")
    _assert_equal(full_state_dict(jitted), before)
    _step(jitted, optimizer)
    _assert_equal(full_state_dict(jitted), after)
    with eager(jitted) as module:
        assert {n: v.shape for n, v in module.state_dict().items()} == {n: v.shape for n, v in before.items()}


def test_dcp_saves_and_loads_a_sharded_model_and_its_optimizer_directly(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_save_with_dcp_directly, tmp_path)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _refuse_entries(rank: int, world_size: int) -> None:
    models, twin = _models()
    jitted = models[""]
    before = full_state_dict(jitted)
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, _pickled(jitted.state_dict()))
    theirs = torch.load(io.BytesIO(everyones[1 - rank]), weights_only=False)
    rows = {name: param.to_local().detach().clone() for name, param in jitted.named_parameters()}
    for prefix, owner in models.items():
        own = owner.state_dict()
        with pytest.raises(ValueError, match=r"keep_vars=True.*named_parameters\(\)"):
            owner.state_dict(keep_vars=True)
        with pytest.raises(ValueError, match=r"assign=True.*load without assign"):
            owner.load_state_dict(copy.deepcopy(own), assign=True)
        buffers = {name: value.clone() for name, value in own.items() if name.endswith(("offset", "running_mean"))}
        if buffers:
            with pytest.raises(ValueError, match=r"(offset|running_mean)' of a sharded model cannot be replaced"):
                owner.load_state_dict(buffers, strict=False, assign=True)
        if prefix == "":
            for wrong, error in (
                (rows, "the unsharded parameter has shape"),
                (theirs, r"needs rows \[\d, \d\).*dcp\.load"),
            ):
                with pytest.raises(RuntimeError, match=rf"size mismatch for .*{error}"):
                    owner.load_state_dict({**own, **wrong})
            _assert_equal(full_state_dict(jitted), before)
        if prefix == "net.":
            with pytest.raises(
                RuntimeError, match=r"size mismatch for net\._model\..*the unsharded parameter has shape"
            ):
                owner.load_state_dict({**own, **{f"net.{name}": value for name, value in rows.items()}})

    # Entries cannot be copied to unsharded tensors, or saved in a format that cannot represent them.
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        twin.load_state_dict(jitted.state_dict())
    piece = next(v for n, v in sorted(theirs.items()) if isinstance(v, RowPiece))
    for target in (torch.zeros(piece.shape, dtype=piece.dtype), torch.zeros(3, dtype=piece.dtype)):
        with pytest.raises(ValueError, match="copy_ between a RowPiece and other rows"):
            target.copy_(piece)
        with pytest.raises(ValueError, match="copy_ between a RowPiece and other rows"):
            piece.copy_(target)
    for use in (piece.share_memory_, piece.numpy, piece.norm, lambda: piece.view(-1), lambda: torch.stack([piece])):
        with pytest.raises((NotImplementedError, RuntimeError)):
            use()
    safetensors = pytest.importorskip("safetensors.torch")
    for state in ({"piece": piece}, {"entry": next(iter(own.values()))}):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            safetensors.save(state)


def test_entries_with_other_rows_and_plain_rows_are_refused(ranks: Ranks) -> None:
    ranks.run(_refuse_entries)
