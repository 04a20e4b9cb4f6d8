"""Train with Hugging Face's Trainer (needs accelerate): torchrun --nproc-per-node 2 examples/trainer.py"""

from pathlib import Path

import thunder_fsdp_sched as tfs  # before thunder
from thunder_fsdp_sched.huggingface import save_pretrained

import thunder
import torch
import transformers


class ShardedTrainer(transformers.Trainer):
    def _move_model_to_device(self, model, device):
        pass  # main has moved it

    def save_model(self, output_dir=None, _internal_call=False):
        save_pretrained(self.model, output_dir or self.args.output_dir)  # all ranks call save_model

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.args.should_save:  # replace the checkpoint of an earlier run that got further
            Path(output_dir, ".metadata").unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()  # all ranks look for the file
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        tfs.save_checkpoint(self.model, output_dir, self.optimizer, extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        pass  # the model is loaded together with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            extra = {"scheduler": self.lr_scheduler.state_dict()}
            extra = tfs.load_checkpoint(self.model, checkpoint, self.optimizer, extra=extra)
            self.lr_scheduler.load_state_dict(extra["scheduler"])


def main(folder="trained", resume=None, **options):
    """Train; resume the checkpoint that was completed last, unless ``resume`` names another one."""
    resume = resume or tfs.latest_checkpoint(folder)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,  # the jitted module's forward has no names of arguments
        label_names=["labels"],
        report_to=[],
        **{"max_steps": 6, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2, **options},
    )
    torch.manual_seed(0)  # every rank makes the same model
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes))
    model = thunder.jit(model.to(arguments.device), transforms=[tfs.fsdp()])  # .device starts the process group
    tokens = (torch.arange(64)[:, None] + torch.arange(9)) % 64
    data = [{"input_ids": t, "labels": t} for t in tokens]
    trainer = ShardedTrainer(model, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


if __name__ == "__main__":
    main()
