"""Train LoRA adapters of a Hugging Face model with ZeRO-3, save them, and generate.

torchrun --nproc-per-node 2 examples/huggingface.py  (needs: pip install transformers peft)
"""

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched.huggingface import save_pretrained

import peft
import thunder
import torch
import torch.distributed as dist
import transformers

dist.init_process_group("gloo")  # on GPUs "nccl"; then model and batches belong on this rank's device
torch.manual_seed(0)  # every rank makes the same model and adapters
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,  # a compiled model has no cache
)
base = transformers.LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...), then config.use_cache = False
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
model = thunder.jit(peft.get_peft_model(base, lora), transforms=[tfs.fsdp()])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

generator = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank draws its own batches
for step in range(10):
    start = torch.randint(0, 256, (8, 1), generator=generator)
    tokens = (start + torch.arange(16)) % 256
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

save_pretrained(model, "adapters")  # whole adapters, from the first rank; all ranks must call it
with tfs.eager(model) as module:  # the original module, without gradients, with a cache
    generated = module.generate(input_ids=tokens[:1, :4], max_new_tokens=4, do_sample=False, synced_gpus=True)
if dist.get_rank() == 0:
    print("generated", generated[0].tolist())
dist.destroy_process_group()
