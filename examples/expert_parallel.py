"""Train experts in parallel inside a leaf module: torchrun --nproc-per-node 4 examples/expert_parallel.py

Each pair of ranks has two experts, one on each rank. A rank receives the rows of both ranks that the router sends to its
expert. Both pairs have the same experts, so an expert is sharded over two ranks, and everything else over all four. The
exchange of rows depends on data, so the layer runs untraced, as one operator that no other communication crosses.
With --check, gradients and weights are compared with those of one process that has all experts and all batches.
"""

import sys

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import Linear, ModuleList

WIDTH, EXPERTS = 16, 2


class Experts(torch.nn.Module):
    """Sends each row to the expert that the router chooses, on whichever rank of ``group`` that is.

    Args:
        own: the numbers of the experts that this rank has; all of them without a group.
    """

    def __init__(self, own, group=None):
        super().__init__()
        self.group, self.router = group, Linear(WIDTH, EXPERTS)
        self.experts = ModuleList(Linear(WIDTH, WIDTH) for _ in own)

    def forward(self, x):
        rows = x.flatten(0, -2)
        scores, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        sent = (rows * scores[:, None])[order]
        if self.group is None:
            parts = [expert(part) for expert, part in zip(self.experts, sent.split(counts.tolist()), strict=True)]
            returned = torch.cat(parts)
        else:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=self.group)
            sizes, other_sizes = counts.tolist(), arriving.tolist()
            there = all_to_all_single(sent.new_empty(sum(other_sizes), WIDTH), sent, other_sizes, sizes, self.group)
            [expert] = self.experts
            returned = all_to_all_single(torch.empty_like(sent), expert(there), sizes, other_sizes, self.group)
        return torch.empty_like(returned).index_copy(0, order, returned).view_as(x)


class Model(torch.nn.Module):
    def __init__(self, own=range(EXPERTS), group=None):
        super().__init__()
        self.inputs, self.outputs = Linear(WIDTH, WIDTH), Linear(WIDTH, 1)
        self.layers = ModuleList(Experts(own, group) for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return self.outputs(x).square().mean()


def batch_of(rank, step):
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def main(check=False):
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    same = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(0)
    whole = Model().double()
    model = Model([rank % 2], pairs[rank // 2]).double()
    in_whole = lambda name: name.replace(".experts.0.", f".experts.{rank % 2}.")  # noqa: E731
    model.load_state_dict({name: whole.state_dict()[in_whole(name)] for name in model.state_dict()})

    is_expert = lambda name: ".experts" in name  # noqa: E731
    transform = tfs.fsdp(
        leaf_modules=[("layers.*", torch.empty_like)],
        ranks=tfs.Ranks(process_group_for=lambda name, param: same[rank % 2] if is_expert(name) else None),
        gradient_divide_factor=lambda name, module: (
            4.0 if is_expert(name) else None
        ),  # an expert receives rows from two ranks
    )
    model = thunder.jit(model, transforms=[transform])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(3):
        loss = model(batch_of(rank, step))
        loss.backward()
        if check:
            expected = [whole(batch_of(each, step)) for each in range(4)]
            (sum(expected) / 4).backward()
            torch.testing.assert_close(loss, expected[rank])
            grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad.full_tensor(), grads[in_whole(name)])
            reference.step()
            reference.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.4f}" + ", gradients as in one process" * check)
    return model, whole


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main("--check" in sys.argv[1:])
    dist.destroy_process_group()
