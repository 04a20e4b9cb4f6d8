"""Functions of other libraries that would take a rank's rows for the model are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
from ranks import on_ranks
from thunder.core.transforms import add_transform
from thunder.distributed import checkpoint as thunder_checkpoint
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor

REFUSED = "sharded by thunder_fsdp_sched"


def _assert_refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        call(*args, **kwargs)


@on_ranks()
def test_state_dict_functions_of_torch_work_and_those_of_thunder_refuse_sharded_models(rank: int) -> None:
    torch.manual_seed(0)
    nested = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    for module in (nested, nn.Linear(4, 6)):
        unsharded = copy.deepcopy(module.state_dict())
        jitted = thunder.jit(module, transforms=[fsdp()])
        optimizer = torch.optim.AdamW(jitted.parameters(), lr=0.1)
        jitted(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        trained = full_state_dict(jitted)
        models = (
            jitted,
            module,
            nn.ModuleDict({"net": jitted}),
            *(m for m in module.modules() if next(m.parameters(), None) is not None),
        )
        for model in models:
            path = next((p for p, m in module.named_modules() if m is model), "")
            prefix = f"{path}." if path else ""
            for full in (False, True):
                options = torch_state_dict.StateDictOptions(full_state_dict=full)
                state = copy.deepcopy(torch_state_dict.get_model_state_dict(model, options=options))
                names = [name.removeprefix("net.") for name in state]
                for name, value in zip(names, state.values(), strict=True):
                    value = value.full_tensor() if isinstance(value, DTensor) else value
                    assert torch.equal(value, trained[prefix + name]), (type(model), name)
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                torch_state_dict.set_model_state_dict(model, state, options=options)
                for name in names:
                    assert torch.equal(full_state_dict(jitted)[prefix + name], trained[prefix + name])
                torch_state_dict.get_optimizer_state_dict(jitted, optimizer, options=options)
                for rank0_only in (False, True):
                    theirs = thunder_checkpoint.StateDictOptions(full_state_dict=full, rank0_only=rank0_only)
                    _assert_refused(thunder_checkpoint.get_model_state_dict, model, theirs, rank)
                    _assert_refused(thunder_checkpoint.load_model_state_dict, dict(unsharded), model, theirs, rank)
        jitted(torch.randn(2, 4)).sum().backward()

    # The functions still work on modules that are not sharded.
    plain = nn.Linear(4, 6)
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    assert torch_state_dict.get_model_state_dict(plain, options=options).keys() == {"weight", "bias"}
    assert thunder_checkpoint.get_model_state_dict(plain, thunder_checkpoint.StateDictOptions(True), rank)


@on_ranks()
def test_cuda_graphs_are_refused() -> None:
    for transforms in ([fsdp(), CUDAGraphTransform()], [CUDAGraphTransform(), fsdp()]):
        model = thunder.jit(nn.Linear(4, 6), transforms=transforms)
        with pytest.raises(ValueError, match="CUDAGraphTransform would capture the collectives"):
            model(torch.randn(2, 4))
    model = add_transform(thunder.jit(nn.Linear(4, 6), transforms=[fsdp()]), transform=CUDAGraphTransform())
    with pytest.raises(ValueError, match="CUDAGraphTransform would capture the collectives"):
        model(torch.randn(2, 4))


class _WithReshard(nn.Linear):
    def reshard(self) -> str:
        return "its own"


@on_ranks()
def test_methods_of_fsdp2_name_their_replacements() -> None:
    model = thunder.jit(_WithReshard(4, 6), transforms=[fsdp()])
    assert model.reshard() == "its own"
    for call, instead in (
        (lambda: model.set_requires_gradient_sync(False), r"with model\.no_sync\(\):"),
        (lambda: model.set_reshard_after_forward(True, recurse=False), r"sharding_strategy='zero2' or 'zero3'"),
        (lambda: model.unshard(async_op=True), r"with tfs\.unsharded\(model, \.\.\.\)"),
        (lambda: model.set_post_optim_event(None), r"table of methods under 'From FSDP2'"),
    ):
        with pytest.raises(NotImplementedError, match=instead):
            call()


@on_ranks()
def test_a_call_under_torch_compile_is_refused() -> None:
    model = thunder.jit(nn.Linear(4, 6), transforms=[fsdp()])
    with pytest.raises(RuntimeError, match=r"leave torch\.compile out, because Thunder compiles the module"):
        torch.compile(model, backend="eager")(torch.randn(2, 4))
    outside = torch.compiler.disable(lambda x: model(x))
    assert torch.compile(lambda x: outside(x) + 1, backend="eager")(torch.randn(2, 4)).shape == (2, 6)


@on_ranks()
def test_ddp_refuses_shards_unless_it_ignores_them() -> None:
    for wrap in (lambda m: m, nn.Sequential, lambda m: nn.Sequential(nn.Linear(4, 4), nn.Sequential(m))):
        model = thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()])
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel would copy|needs rows of other ranks|c10d"):
            nn.parallel.DistributedDataParallel(wrap(model))(torch.randn(2, 4))
    holder = nn.Sequential(nn.Linear(4, 4), thunder.jit(nn.Linear(4, 4, bias=False), transforms=[fsdp()]))
    sharded = [name for name, _ in holder.named_parameters() if "_model" in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, sharded)
    nn.parallel.DistributedDataParallel(holder)(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in holder.parameters())
