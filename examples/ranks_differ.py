"""Train ranks on different parts of a model and unequal data: torchrun --nproc-per-node 2 examples/ranks_differ.py

Only batches with an image run the encoder, and ranks run out of batches at different times. With FSDP2, such a loop hangs
unless all ranks run the encoder (on a dummy image, times 0) and drop the batches that other ranks do not have.
With --check, the weights are compared with those of one process that trains on the batches of all ranks.
"""

import copy
import sys

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import GELU, Embedding, Linear, Sequential
from torch.nn.functional import cross_entropy


class TwoTowers(torch.nn.Module):
    """A text model with an encoder of images."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = Embedding(256, width)
        self.encoder = Sequential(Linear(48, width), GELU(), Linear(width, width))
        self.text = Sequential(*(Sequential(Linear(width, width), GELU()) for _ in range(2)))
        self.head = Linear(width, 256)

    def forward(self, tokens, image=None):
        hidden = self.embedding(tokens)
        if image is not None:  # each rank's own batch decides
            hidden = hidden + self.encoder(image).unsqueeze(1)
        logits = self.head(self.text(hidden))
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches_of(rank):
    """Return 5 batches for even ranks and 8 for odd ones. Some have an image."""
    random = torch.Generator().manual_seed(rank)
    batches = []
    for number in range(5 + 3 * (rank % 2)):
        tokens = torch.randint(0, 256, (4, 16), generator=random)
        image = torch.randn(4, 48, generator=random)
        batches.append((tokens, image) if (number + rank) % 3 == 0 else (tokens,))
    return batches


def tools(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def train(model, batches):
    """Return the number of steps and the last loss of this rank."""
    optimizer, scheduler = tools(model)
    steps = 0
    for batch in tfs.batches(model, batches):  # continues until no rank has another batch
        if batch is None:  # other ranks have one: take part in the communication of their forward and backward
            loss = tfs.without_batch(model)
        else:
            loss = model(*batch)
            last_loss = loss.item()
        loss.backward()  # sums over the ranks that used a parameter, divided by all; None where no rank used it
        tfs.clip_grad_norm_(model, 1.0)  # from here on, all ranks do the same
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        steps += 1
    return steps, last_loss


def train_unsharded(model, ranks):
    """Train in one process on the batches of all ranks."""
    optimizer, scheduler = tools(model)
    of_ranks = [batches_of(rank) for rank in range(ranks)]
    for step in range(max(map(len, of_ranks))):
        for batches in of_ranks:
            if step < len(batches):
                (model(*batches[step]) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def main(check=False):
    """Return the number of steps, and with ``check`` the largest difference of a weight from those of one process."""
    if check:
        torch.set_default_dtype(torch.float64)  # so that rounding does not hide mistakes
    rank, batches = dist.get_rank(), batches_of(dist.get_rank())
    torch.manual_seed(0)
    original = TwoTowers()
    reference = copy.deepcopy(original)
    model = thunder.jit(original, transforms=[tfs.fsdp(ranks_may_differ=True)])
    steps, loss = train(model, batches)
    images = sum(len(batch) == 2 for batch in batches)
    print(f"rank {rank}: {len(batches)} batches, {images} with images; {steps} steps, last loss {loss:.3f}")
    if not check:
        return steps, None
    train_unsharded(reference, dist.get_world_size())
    weights = tfs.full_state_dict(model)
    difference = max((weights[name] - value).abs().max().item() for name, value in reference.state_dict().items())
    print(f"rank {rank}: the weights differ by at most {difference:.1g} from those of one process")
    return steps, difference


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(check="--check" in sys.argv)
    dist.destroy_process_group()
