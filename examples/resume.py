"""Resume killed runs: torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py checkpoints"""

import os
import sys
from pathlib import Path

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import GELU, Embedding, Linear, Sequential

folder = Path(sys.argv[1])  # on a disk that all ranks see
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)
with torch.device("meta"):  # uses no memory; param_init_fn initializes one submodule at a time
    blocks = [Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(2)]
    model = Sequential(Embedding(256, 64), *blocks, Linear(64, 256))
init = tfs.Init(device=device, param_init_fn=lambda module: module.reset_parameters())
model = thunder.jit(model, transforms=[tfs.fsdp(init=init)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

first = 0
if latest := tfs.latest_checkpoint(folder):
    extra = tfs.load_checkpoint(model, latest, optimizer, extra={"step": 0, "scheduler": scheduler.state_dict()})
    scheduler.load_state_dict(extra["scheduler"])
    first = extra["step"] + 1
    print(f"rank {dist.get_rank()} goes on with step {first}")


def loss_of(seed):
    tokens = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(seed)).to(device)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 256)


for step in range(first, 200):
    with model.no_sync():  # gradients of half a batch accumulate, and are reduced with those of the other half
        loss_of(4 * step + dist.get_rank()).backward()
    loss = loss_of(4 * step + 2 + dist.get_rank())
    loss.backward()
    tfs.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        extra = {"step": step, "scheduler": scheduler.state_dict()}
        tfs.save_checkpoint(model, folder / f"step-{step}", optimizer, extra=extra)
        print(f"rank {dist.get_rank()}: step {step}, loss {loss.item()!r}", flush=True)

if not (folder / "model" / "model.safetensors.index.json").exists():  # otherwise an earlier run wrote it
    tfs.save_safetensors(model, folder / "model")  # whole parameters, for other tools
dist.destroy_process_group()
