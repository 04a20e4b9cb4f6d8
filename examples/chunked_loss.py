"""Compute the loss over a large vocabulary in chunks: torchrun --nproc-per-node 2 examples/chunked_loss.py"""

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import Embedding, Linear, Sequential, Tanh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

VOCABULARY = 8192


class LanguageModel(torch.nn.Module):
    """A model whose logits exist for one chunk of tokens at a time, in forward and in backward."""

    def __init__(self, width=64, chunks=8):
        super().__init__()
        self.body = Sequential(Embedding(VOCABULARY, width), Linear(width, width), Tanh())
        self.head = Linear(width, VOCABULARY, bias=False)
        self.chunks = chunks

    def loss_of(self, hidden, targets):
        return cross_entropy(self.head(hidden), targets, reduction="none").sum()

    def forward(self, tokens, targets):
        hidden, targets = self.body(tokens).flatten(0, 1), targets.flatten()
        chunks = zip(hidden.chunk(self.chunks), targets.chunk(self.chunks), strict=True)
        losses = [checkpoint(self.loss_of, h, t, use_reentrant=False) for h, t in chunks]
        return torch.stack(losses).sum() / targets.numel()


def main(chunks=8):
    torch.manual_seed(0)
    model = thunder.jit(LanguageModel(chunks=chunks), transforms=[transform := tfs.fsdp()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (8, 64))
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = transform.compiled[-1].memory.peak.nbytes
    print(f"rank {dist.get_rank()}: losses {losses}, peak of a step {peak / 1e6:.1f} MB")
    return losses, transform.compiled[-1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
