"""Plan Llama-3-8B on 8, 64 and 512 H100 GPUs: python examples/plan_llama.py 8192 32 (tokens, blocks)

Float32 shards, gradients and AdamW state; bfloat16 gathers and compute. The model is on the meta device; no download."""

import sys

from thunder_fsdp_sched.planning import describe_fit, dry_run_step, with_optimizer  # before thunder

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as Precision
from torch.nn import Embedding, Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Block(Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = RMSNorm(4096), Linear(4096, 6144, bias=False), Linear(4096, 4096, bias=False)
        self.norm2, self.up, self.down = RMSNorm(4096), Linear(4096, 28672, bias=False), Linear(14336, 4096, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (48, 128)).transpose(1, 2).split((32, 8, 8), dim=1)
        q, k = (y * cos + torch.cat((-y[..., 64:], y[..., :64]), -1) * sin for y in (q, k))
        k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Llama(Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding, self.head = Embedding(128256, 4096), Linear(4096, 128256, bias=False)
        self.blocks, self.norm = ModuleList([Block() for _ in range(blocks)]), RMSNorm(4096)

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(length=8192, blocks=32):
    with torch.device("meta"):
        return Llama(blocks), (torch.zeros(1, length).long(), *torch.zeros(2, length, 128).bfloat16())


def main(*sizes):
    precision = Precision(torch.bfloat16, torch.float32)
    for world_size, limit in ((8, None), (64, None), (512, None), (8, "66GB")):
        options = {"world_size": world_size, "max_memory": limit, "mp_policy": precision}
        step = dry_run_step(lambda: make(*sizes), on="h100-sxm", **options)
        fit = describe_fit(with_optimizer(step), step.cluster.memory, "H100")
        print(f"{step.world_size} ranks, {1e3 * step.after.step_seconds:,.2f} ms a step: {fit}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
