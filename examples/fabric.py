"""Train with Lightning Fabric, which starts two processes: python examples/fabric.py checkpoints"""

import sys
from pathlib import Path

from thunder_fsdp_sched.fabric import FSDPSchedStrategy  # before thunder

import torch
from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric
from torch.nn import GELU, Embedding, Linear, Sequential
from torch.nn.functional import cross_entropy

folder = Path(sys.argv[1])  # on a disk that all ranks see
strategy = FSDPSchedStrategy(sharding_strategy="zero3", prefetch=1)  # the options of thunder_fsdp_sched.fsdp
fabric = Fabric(accelerator="auto", devices=2, strategy=strategy)  # precision="bf16-mixed" computes in bfloat16
fabric.launch()

fabric.seed_everything(0)  # every rank initializes the same model
with fabric.init_module(empty_init=True):  # on the meta device; fabric.setup initializes one submodule at a time
    blocks = [Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(2)]
    model = Sequential(Embedding(256, 64), *blocks, Linear(64, 256))
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

state = {"model": model, "optimizer": optimizer, "step": 0}
if (folder / "latest").exists():
    fabric.load(folder / "latest", state)

torch.manual_seed(1 + fabric.global_rank + 2 * state["step"])  # each rank draws its own batches
while state["step"] < 20:
    for part in range(2):
        tokens = torch.randint(0, 256, (8, 32), device=fabric.device)
        with fabric.no_backward_sync(model, enabled=part == 0):  # the second backward reduces the gradients of both
            loss = cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 256)
            fabric.backward(loss / 2)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    if state["step"] % 10 == 0:
        fabric.save(folder / "latest", state)
        fabric.print(f"step {state['step']}: loss {loss.item():.3f}")

strategy.state_dict_type = "full"  # one file with whole parameters, for other tools
fabric.save(folder / "model.pt", {"model": model})
