"""Plan a training step on a cluster that you do not have: python examples/plan.py

One process traces the model on the meta device as rank 0 of 64 would, and simulates a step. Nothing is sent or computed.
"""

from thunder_fsdp_sched.planning import dry_run_step  # before thunder

import torch
from torch import nn
from torch.nn import functional as F

BLOCKS, WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 2, 1024, 8, 4096, 256, 512


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.ffn_norm, self.ffn = nn.Linear(WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH), Perceptron()

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).split(HEADS, dim=1)
        half = q.shape[-1] // 2
        q, k = (y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def make():
    """Return a module and the inputs of a call."""
    with torch.device("meta"):
        return Decoder().to(torch.bfloat16), (torch.zeros((8, LENGTH), dtype=torch.int64),)


def main():
    steps = {}
    for strategy in ("zero2", "zero3"):
        steps[strategy] = step = dry_run_step(make, world_size=64, on="h100-sxm", sharding_strategy=strategy)
        time = step.after
        print(
            f"{strategy}: step {1e3 * time.step_seconds:.2f} ms, unsorted {1e3 * step.before.step_seconds:.2f} ms, "
            f"{1e3 * time.exposed_seconds:.2f} ms of communication exposed, "
            f"at most {time.peak_unsharded_bytes / 1e6:.1f} MB unsharded"
        )
    return steps


if __name__ == "__main__":
    main()
