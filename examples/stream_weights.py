"""Send weights to an inference process after training: torchrun --nproc-per-node 3 examples/stream_weights.py"""

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import GELU, Embedding, Linear, Sequential


def send(model, engine):
    """Send each parameter from rank 0. All training ranks call this, because they gather the parameters together."""
    for name, tensor in tfs.stream_full_parameters(model):  # dtype=torch.bfloat16 would send half of the bytes
        if dist.get_rank() == 0:
            dist.broadcast_object_list([(name, tensor.shape, tensor.dtype)], src=0, group=engine)
            dist.broadcast(tensor, src=0, group=engine)  # blocks until sent: a later bucket overwrites the tensor
    if dist.get_rank() == 0:
        dist.broadcast_object_list([None], src=0, group=engine)


def receive(model, engine):
    """Replace the parameters of the inference process by those that rank 0 sends."""
    while True:
        dist.broadcast_object_list(received := [None], src=0, group=engine)
        if received[0] is None:
            return
        name, shape, dtype = received[0]
        dist.broadcast(tensor := torch.empty(shape, dtype=dtype), src=0, group=engine)
        with torch.no_grad():
            model.get_parameter(name).copy_(tensor)


def main():
    """Return the logits of a prompt, which must be the same on all ranks."""
    *trainers, server = range(dist.get_world_size())
    training, engine = dist.new_group(trainers), dist.new_group([0, server])
    torch.manual_seed(int(dist.get_rank() == server))  # the inference process starts with other weights
    model = Sequential(Embedding(256, 64), Linear(64, 256), GELU(), Linear(256, 256))
    prompt = torch.arange(8).unsqueeze(0)
    if dist.get_rank() == server:
        receive(model, engine)
        with torch.no_grad():
            return model(prompt)
    model = thunder.jit(model, transforms=[tfs.fsdp(ranks=training)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(prompt).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    send(model, engine)
    with tfs.eager(model) as module:
        return module(prompt)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: next token {main()[0, -1].argmax().item()}")
    dist.destroy_process_group()
