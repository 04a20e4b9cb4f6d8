"""Compare whole steps with real compute, the optimizer included, on ranks over plain loopback.

    python benchmarks/real_compute.py --ranks 2                     # GPT; FSDP2, DDP, Thunder and this package
    python benchmarks/real_compute.py --ranks 2 --model llama       # RMS norm, SwiGLU, rotary positions, grouped queries
    python benchmarks/real_compute.py --ranks 1 --only 'ours|eager'
    python benchmarks/real_compute.py --rounds 1 --blocks 1 --width 64 --length 32 --batch 1      # only to see that it runs

The other benchmarks emulate compute, which is right for questions of overlap, and hides how fast operators run. Here
each rank has one thread, and ranks and gloo share the cores. All systems take turns: one step of each in every round, in
another order each time. Seconds are those of the slowest rank.

* First: seconds of the first step, which compiles.
* Host: seconds of processor time of the main thread in a step; with one thread a rank it contains the operators.
* Symbols: bound symbols of forward and backward.
* Of eager, of FSDP2: medians of the ratios in each round.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401

import harness
import torch
import torch.distributed as dist
from harness import matching, medians, ratio
from systems import Emulation, Make, Shape, build, ddp, fsdp2, ours, step, unsharded, unsharded_eager
from byte_gpt import VOCABULARY
from torch import nn
from torch.nn import functional as F


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU, each after an RMS norm."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, max(heads // 2, 1), width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, heads * size, bias=False)
        self.kv = nn.Linear(width, 2 * self.groups * size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3 // 32 * 32
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm_1(x)
        q = self.q(normed).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, self.groups, -1).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = (
            t[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).reshape(q.shape)
            for t in (self._rotate(k), v)
        )
        y = F.scaled_dot_product_attention(self._rotate(q), k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A model that predicts the next byte, in Llama's shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        heads = max(shape.width // 64, 1)
        self.blocks = nn.ModuleList(LlamaBlock(shape.width, heads, shape.length) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class LlamaShape(Shape):
    def model(self) -> Any:
        torch.manual_seed(0)
        return Llama(self)


SYSTEMS: dict[str, Make] = {
    "eager, one rank": unsharded_eager,
    "Thunder, one rank": unsharded,
    "DDP": ddp,
    "FSDP2": partial(fsdp2, reshard=True),
    "FSDP2 zero2": partial(fsdp2, reshard=False),
    "FSDP2 compiled": partial(fsdp2, reshard=True, compiled=True),
    "ours zero3": partial(ours, sharding_strategy="zero3"),
    "ours zero3, Thunder's operators": partial(ours, executors=["sdpa"], sharding_strategy="zero3"),
    "ours zero3, torch.compile": partial(
        ours, executors=["torch_kernels", "torchcompile_cat", "sdpa"], sharding_strategy="zero3"
    ),
    "ours zero3, blocks as leaves": partial(ours, leaf_modules=("blocks.*",), sharding_strategy="zero3"),
    "ours zero3, compiled leaves": partial(ours, compiled_blocks=True, sharding_strategy="zero3"),
    "ours zero2": partial(ours, sharding_strategy="zero2"),
}

COLUMNS: harness.Columns = {
    "first s": ("first", ".1f"),
    **harness.STEP,
    "host s": ("host", ".3f"),
    "symbols": ("symbols", "d"),
    "of eager": ("of_eager", ".2f"),
    "of FSDP2": ("of_fsdp2", ".2f"),
}


def run(arguments: argparse.Namespace) -> None:
    kind = LlamaShape if arguments.model == "llama" else Shape
    shape = kind(arguments.blocks, arguments.width, arguments.length, arguments.batch)
    emulation, tokens = Emulation(shape, real=True), shape.tokens(dist.get_rank())
    makes = matching(SYSTEMS, arguments.only, "eager, one rank", "FSDP2")
    systems = build(makes, shape, emulation, lambda system: step(system, tokens, host=[]))
    for system in systems.values():
        step(system, tokens)
    hosts: dict[str, list[float]] = {name: [] for name in systems}
    runs = {name: partial(step, system, tokens, host=hosts[name]) for name, system in systems.items()}
    seconds = harness.in_turns(runs, arguments.rounds)
    of_host = medians(hosts)
    figures: dict[str, dict[str, Any]] = {}
    for name, steps in seconds.items():
        figures[name] = harness.summary(steps) | {
            "first": systems[name].first_seconds,
            "host": of_host[name],
            "of_eager": ratio(steps, seconds["eager, one rank"]),
            "of_fsdp2": ratio(steps, seconds["FSDP2"]),
        }
        if (transform := systems[name].transform) is not None:
            compiled = transform.compiled[-1]
            figures[name]["symbols"] = len(compiled.forward.bound_symbols) + len(compiled.backward.bound_symbols)
    if dist.get_rank() == 0:
        sharded = {name: system.losses for name, system in systems.items() if "one rank" not in name}
        harness.report(arguments, "real_compute", [{"emulated": 0, "figures": figures}], COLUMNS, sharded)


if __name__ == "__main__":
    parser = harness.rank_options(__doc__, blocks=6, width=256, length=128, no_limit=True)
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    harness.run_on_ranks(__file__, parser.parse_args(), run)
