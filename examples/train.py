"""Train a small model with ZeRO-3: torchrun --nproc-per-node 2 examples/train.py"""

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
import torch.distributed as dist
from torch.nn import GELU, Embedding, Linear, Sequential

dist.init_process_group("gloo")  # on GPUs "nccl"; then model and batches belong on this rank's device
torch.manual_seed(0)  # every rank makes the same model; or pass init=tfs.Init(broadcast_from=0)
blocks = [Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(2)]
model = Sequential(Embedding(256, 64), *blocks, Linear(64, 256))
transform = tfs.fsdp(sharding_strategy="zero3", bucketing_strategy="block", prefetch=1)
model = thunder.jit(model, transforms=[transform])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + dist.get_rank())  # each rank draws its own batches
for step in range(20):
    tokens = torch.randint(0, 256, (8, 32))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step}: loss {loss.item():.3f}")

if dist.get_rank() == 0:
    print(transform.schedules[-1].forward)
weights = tfs.full_state_dict(model)  # whole parameters; all ranks must call it
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
dist.destroy_process_group()
