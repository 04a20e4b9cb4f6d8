"""``eager``: evaluation and generation without compiling."""

from __future__ import annotations

import copy
import re
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.extras.training.eager import LazyParameter
from thunder_fsdp_sched.transports.flat import Flat

import pytest
import thunder
import torch
from coded import coded
from internals import slot_bytes
from models import GPT, Block, Calling, Layer
from ranks import on_ranks
from scenario import Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


def calling_block(width: int) -> nn.Module:
    """Return a block that calls its layers instead of their ``forward``, so that their hooks run."""
    layers = {"norm": nn.LayerNorm(width), "up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)}
    return Calling(lambda self, x: x + self.down(torch.tanh(self.up(self.norm(x)))), **layers)


class LM(nn.Module):
    """A language model with a norm that has buffers, a block that is called twice, and a buffer that forward replaces."""

    def __init__(self, tied: bool = False, width: int = 16, vocab: int = 23) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        # A module that returns a view of its parameter.
        self.positions = Calling(lambda self, end: self.table[:end], table=nn.Parameter(torch.randn(16, width)))
        first = calling_block(width)
        self.blocks = nn.ModuleList([first, calling_block(width), first])
        self.norm = nn.BatchNorm1d(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.fail = False
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # replaces the tensor
        x = self.embedding(tokens) + self.positions(tokens.shape[1])
        for block in self.blocks:
            x = block(x)
            if self.fail:
                raise ArithmeticError("a bad batch")
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Generate greedily and return the sequence and the last logits."""
        for _ in range(count):
            logits = self(tokens)
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), 1)
        return tokens, logits


def _number_of_hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (model, *model._model.modules()))


@pytest.mark.parametrize(
    ("options", "tied", "dtype"),
    [
        ({}, False, None),
        ({"bucketing_strategy": "layer"}, True, torch.bfloat16),
        ({"ranks": "hybrid", "transport": "coalesced", "init": tfs.Init(ignored_params=["norm.weight"])}, True, None),
    ],
    ids=["blocks", "tied-layers-bfloat16", "tied-hybrid-coalesced-ignored"],
)
@on_ranks(2)
def test_generation_is_bit_equal_to_the_unsharded_module(
    rank: int, world_size: int, options: dict[str, Any], tied: bool, dtype: torch.dtype | None
) -> None:
    if "ranks" in options:
        options["ranks"] = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    plain = LM(tied).eval()
    for name in ("running_mean", "running_var"):  # torch's batch norm on a CPU needs them in the dtype of its weight
        setattr(plain.norm, name, torch.rand(16, dtype=dtype))
    transform = fsdp(**options)
    model = thunder.jit(copy.deepcopy(plain), transforms=[transform])
    plain.to(dtype)
    own = dict(model._model.named_parameters(remove_duplicate=False))
    assert all(model.get_parameter(name) is param for name, param in own.items())
    hooks = _number_of_hooks(model)
    tokens = torch.randint(23, (2, 3), generator=torch.Generator().manual_seed(rank))
    for reshard in (True, False):
        with tfs.eager(model, reshard_after_forward=reshard) as module:
            for mode in (torch.no_grad, torch.inference_mode):  # they differ in the last bit on some processors
                with mode():
                    ours, logits = module.generate(tokens, 5)
                    theirs, expected = plain.generate(tokens, 5)
                assert torch.equal(ours, theirs) and ours.shape == (2, 8)
                assert torch.equal(logits, expected.float()) and logits.dtype == torch.float32
            if not reshard:
                assert torch.equal(module.embedding.weight, plain.embedding.weight)
                assert tied == (module.embedding.weight is module.head.weight)
        now = dict(model._model.named_parameters(remove_duplicate=False))
        assert all(now[name] is param for name, param in own.items()) and now.keys() == own.keys()
    assert model.get_buffer("calls") == 20
    assert _number_of_hooks(model) == hooks
    assert not transform.compiled


@on_ranks(2)
def test_at_most_one_block_and_the_root_bucket_are_unsharded() -> None:
    transform = fsdp()
    model = thunder.jit(LM(tied=True).eval(), transforms=[transform])
    sizes = {b.name: slot_bytes(b, b.param_dtype) for b in transform.plan}
    limit = sizes["embedding"] + sizes["blocks.0"]
    alive: dict[int, int] = {}
    gathered: list[str] = []
    all_gather = Flat.all_gather

    def gather(self: Flat, bucket: Any, shard: torch.Tensor, unsharded: Any) -> Any:
        storage = unsharded.flat.untyped_storage()
        alive[len(gathered)] = storage.nbytes()
        weakref.finalize(storage, alive.pop, len(gathered))
        gathered.append(bucket.spec.name)
        deadline = time.monotonic() + 10
        while sum(alive.values()) > limit and time.monotonic() < deadline:
            time.sleep(0.001)  # gloo's thread releases a tensor a little later
        assert sum(alive.values()) <= limit, (alive, gathered, sizes)
        return all_gather(self, bucket, shard, unsharded)

    tokens = torch.zeros(1, 4, dtype=torch.long)
    with mock.patch.object(Flat, "all_gather", gather), tfs.eager(model) as module:
        assert gathered == ["embedding"] and transform.plan["embedding"].params[0].names[1] == "head.weight"
        for length in (2, 3, 4):
            module(tokens[:, :length])
        assert gathered[1:] == ["positions", "blocks.0", "blocks.1", "blocks.0", "norm", "attention"] * 3
        assert alive[0] == sizes["embedding"]


OUTSIDE_OF_ITS_MODULE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda self, x: nn.functional.linear(x, self.embedding.weight),
    "matmul": lambda self, x: x @ self.embedding.weight.T,
    "data": lambda self, x: torch.mm(x[0], self.embedding.weight.data.t()),
    "conv1d": lambda self, x: nn.functional.conv1d(x.mT, self.embedding.weight[:, :, None]),
    "embedding": lambda self, x: x + nn.functional.embedding(x.argmax(-1), self.first.weight),
    "frozen": lambda self, x: x * self.first.bias,
    "transposed": lambda self, x: nn.functional.linear(x, self.second.weight, self.second.bias),
    "its forward": lambda self, x: self.second.forward(self.first.forward(x)),
    "device": lambda self, x: x @ torch.ones(16, 16, device=self.second.weight.device),
}


@pytest.mark.parametrize("options", [{}, {"bucketing_strategy": "layer", "sharding_strategy": "zero2"}])
@on_ranks(2)
def test_a_parameter_may_be_used_outside_of_its_module(options: dict[str, Any]) -> None:
    """On a CPU, some of these operators accept a meta tensor, and return memory that nobody has written."""
    for name, use in OUTSIDE_OF_ITS_MODULE.items():
        layers = {"embedding": nn.Embedding(23, 16), "first": nn.Linear(16, 16), "second": nn.Linear(16, 16)}
        plain = Calling(lambda self, x: self.use(self, self.first(self.embedding(x))), **layers, use=use)
        plain.first.bias.requires_grad_(False)
        plain.second.weight = nn.Parameter(plain.second.weight.detach().T)
        model = thunder.jit(copy.deepcopy(plain), transforms=[fsdp(**options)])
        tokens = torch.arange(6).view(2, 3)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), tfs.eager(model) as module:
                for _ in range(2):
                    assert torch.equal(module(tokens), plain(tokens)), name


@on_ranks(2)
def test_a_bucket_stays_from_the_first_use_outside_of_its_module(rank: int) -> None:
    model = thunder.jit(LM().eval(), transforms=[fsdp()])
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with mock.patch.object(Flat, "all_gather", autospec=True, side_effect=Flat.all_gather) as gather:
        with tfs.eager(model) as module:
            head = module.head.weight
            assert head.shape == (23, 16) and head.device.type == "cpu" and head.requires_grad
            assert hasattr(module.state_dict()["head.weight"], "full_tensor") and "LazyParameter" in str(head)
            assert not gather.called
            with torch.enable_grad(), pytest.raises(RuntimeError, check=coded("step.gradients-inside-eager")):
                head.norm()
            for _ in range(2):
                head.norm()
                module.head(torch.zeros(1, 16))
                assert torch.equal(head, module.head.weight)
            assert [call.args[1].spec.name for call in gather.call_args_list] == ["head"]
        with pytest.raises(RuntimeError, check=coded("step.parameter-used-after-eager", "head.weight")):
            head.norm()
        with pytest.raises(tfs.ScheduleDisagreement, check=coded("ranks.actions-differ")), tfs.eager(model) as module:
            if rank:
                module.head.weight.norm()
            module.embedding(tokens)


@on_ranks(2)
def test_misuse_is_refused_and_an_exception_restores_the_module() -> None:
    model = thunder.jit(LM().eval(), transforms=[fsdp()])
    tokens = torch.zeros(1, 4, dtype=torch.long)
    own = dict(model._model.named_parameters(remove_duplicate=False))
    with tfs.eager(model) as module:
        expected = module(tokens)
        with pytest.raises(RuntimeError, check=coded("step.eager-inside-eager")), tfs.eager(model):
            pass
        with pytest.raises(RuntimeError, check=coded("step.compiled-call-inside-eager")):
            model(tokens)
        for called in (module, module.blocks[0]):
            with torch.enable_grad(), pytest.raises(RuntimeError, check=coded("step.gradients-inside-eager")):
                called(tokens)
        module.fail = True
        with pytest.raises(ArithmeticError):
            module(tokens)
        assert all(isinstance(p, LazyParameter) for p in module.parameters())
        module.fail = False
        assert torch.equal(module(tokens), expected)
    with pytest.raises(ArithmeticError), tfs.eager(model, reshard_after_forward=False) as module:
        module.fail = True
        module(tokens)
    assert all(param is own[name] for name, param in model._model.named_parameters())
    assert torch.is_grad_enabled()


@on_ranks(2)
def test_symbolic_values_compile_changing_lengths_once() -> None:
    # Position embeddings are sliced to the length and expanded. ZeRO-3 gathers their parameter again in backward.
    run = Run(GPT(blocks=1, block=Layer).double(), jit_options={"cache": "symbolic values"})
    for step, length in enumerate((3, 4, 8, 1)):  # a size of 1 is compiled by itself
        run.micro_batch(step, no_sync=False, length=length)
        run.step()
    assert len(run.transform.compiled) == 2
    for length in (3, 5, 7):
        run.forward(grad=False, length=length)
    assert len(run.transform.compiled) == 3


@on_ranks()
def test_the_generation_loop_in_the_docs_works() -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "range(100)" in block)
    plain = nn.Sequential(nn.Embedding(23, 16), Block(16), nn.Linear(16, 23))
    named = {"tfs": tfs, "torch": torch, "model": thunder.jit(copy.deepcopy(plain), transforms=[fsdp()])}
    named["tokens"] = expected = torch.zeros(1, 3, dtype=torch.long)
    exec(code, named)
    with torch.no_grad():
        for _ in range(100):
            expected = torch.cat((expected, plain(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(named["tokens"], expected)
