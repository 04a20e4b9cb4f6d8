"""Evaluate a sharded model, then generate with it: torchrun --nproc-per-node 2 examples/evaluate.py"""

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import GELU, Embedding, Linear, Sequential
from torch.nn.functional import cross_entropy, pad

LENGTHS = (16, 32)  # batches are padded to one of these, so two sets of traces are compiled at most
PADDING = -100  # targets that cross_entropy ignores


def evaluate(model, batches):
    """Return the mean loss per token over all ranks. All ranks need the same number of batches, with the same lengths."""
    total = torch.zeros(2)  # sum of losses, number of targets
    with torch.no_grad():
        for tokens in batches:
            length = next(n for n in LENGTHS if n >= tokens.shape[1])
            missing = length - tokens.shape[1]
            targets = pad(tokens[:, 1:], (0, missing + 1), value=PADDING)
            logits = model(pad(tokens, (0, missing)))
            total[0] += cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
            total[1] += (targets != PADDING).sum()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def generate(model, tokens, count):
    """Return ``tokens`` followed by ``count`` generated tokens. All ranks must generate the same number."""
    with tfs.eager(model) as module:  # the original module; a longer input compiles nothing
        for _ in range(count):
            tokens = torch.cat((tokens, module(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


def main():
    torch.manual_seed(0)
    model = Sequential(
        Embedding(256, 64),
        *(Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(2)),
        Linear(64, 256),
    )
    model = thunder.jit(model, transforms=[tfs.fsdp()])
    torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches
    loss = evaluate(model, [torch.randint(0, 256, (4, length)) for length in (10, 16, 25, 32)])
    tokens = generate(model, torch.randint(0, 256, (1, 3)), count=5)
    print(f"rank {dist.get_rank()}: loss {loss:.4f}, tokens {tokens[0].tolist()}")
    return loss, tokens


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
