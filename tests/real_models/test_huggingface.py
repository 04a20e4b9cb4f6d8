"""Hugging Face's transformers, PEFT, accelerate and Trainer with sharded models, on two gloo ranks (``make models``)."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CheckpointError, Init, eager, fsdp, full_state_dict, load_checkpoint, save_checkpoint
from thunder_fsdp_sched.extras import huggingface
from thunder_fsdp_sched.huggingface import save_pretrained
from thunder_fsdp_sched.planning import dry_run_step

import pytest
import thunder
import torch
import torch.distributed as dist
from coded import coded
from forked import run_python
from ranks import Ranks, launched, on_ranks
from saving import assert_equal, contents, update
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed (make models)")

VOCAB, LENGTH = 64, 8


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            **options,
        )
    )


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def _shard(model: nn.Module) -> Any:
    return thunder.jit(model, transforms=[fsdp()])


def test_a_model_on_the_meta_device_can_be_planned() -> None:
    def make() -> Any:
        with torch.device("meta"):
            return _llama(use_cache=False), (torch.zeros((2, LENGTH), dtype=torch.int64),)

    assert dry_run_step(make, world_size=8, on="h100-sxm").seconds > 0


@on_ranks()
def test_what_cannot_be_compiled_is_refused_and_works_in_eager(rank: int) -> None:
    model = _llama()
    reference = copy.deepcopy(model)
    sharded, tokens = _shard(model), _tokens(rank)
    with pytest.raises(ValueError, check=coded("huggingface.cache-not-compilable")):
        sharded(tokens)
    with pytest.raises(ValueError, check=coded("huggingface.cache-not-compilable")):
        from transformers import DynamicCache

        sharded(tokens, use_cache=False, past_key_values=DynamicCache())
    # What collects outputs by hooks is not traced.
    ours, theirs = (m(tokens, use_cache=False, output_hidden_states=True) for m in (sharded, reference))
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states)
    # The decorators of forward, with padding, labels, and the hooks of that request.
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}
    ours, theirs = sharded(**batch), reference(**batch)
    assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.logits, theirs.logits)
    greedy = {"max_new_tokens": 3 + rank, "do_sample": False}
    with eager(sharded) as module:
        generated = module.generate(tokens, synced_gpus=True, **greedy)
    torch.testing.assert_close(generated, reference.generate(tokens, **greedy), rtol=0, atol=0)


@on_ranks()
def test_losses_by_a_number_of_items_and_recomputed_layers(rank: int, world_size: int) -> None:
    model = _llama(use_cache=False)
    model.gradient_checkpointing_enable()
    reference = copy.deepcopy(model)
    sharded, tokens = _shard(model), _tokens(rank)
    for each in (sharded, reference):
        each(tokens, labels=tokens, num_items_in_batch=torch.tensor(9)).loss.backward()
    for name, param in reference.named_parameters():
        dist.all_reduce(param.grad)
        torch.testing.assert_close(sharded.get_parameter(name).grad.full_tensor(), param.grad / world_size)


@on_ranks()
def test_a_model_that_one_rank_has_is_broadcast_to_models_on_meta(rank: int) -> None:
    reference = _llama(tie_word_embeddings=True, use_cache=False)
    model = copy.deepcopy(reference)
    if rank != 0:
        with torch.device("meta"):
            model = _llama(tie_word_embeddings=True, use_cache=False)
    sharded = thunder.jit(model, transforms=[fsdp(init=Init(broadcast_from=0))])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for ours, theirs in (
        (full_state_dict(sharded), reference.state_dict()),
        (dict(model.named_buffers()), dict(reference.named_buffers())),  # tables of rotary embeddings
    ):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)
    torch.testing.assert_close(sharded(_tokens(rank)).logits, reference(_tokens(rank)).logits)


@on_ranks()
def test_save_pretrained_writes_whole_values_that_from_pretrained_loads(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = _llama(tie_word_embeddings=True, use_cache=False)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = _shard(model)
    for save in (model.save_pretrained, sharded.save_pretrained):
        with pytest.raises(RuntimeError, check=coded("huggingface.parameters-are-sharded")):
            save(tmp_path / "refused")
    with pytest.raises(RuntimeError, check=coded("huggingface.parameters-are-sharded")):
        model.save_pretrained(tmp_path / "refused", state_dict=sharded.state_dict())
    with pytest.raises(TypeError, check=coded("huggingface.option-set-by-save-pretrained", "state_dict")):
        save_pretrained(sharded, tmp_path, state_dict={})
    blocked = tmp_path / "a file"
    blocked.touch()
    with pytest.raises(CheckpointError, match="a file"):
        save_pretrained(sharded, blocked / "folder")
    save_pretrained(sharded, tmp_path / "model", max_shard_size="20KB")
    assert not (tmp_path / "refused").exists()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.dtype == torch.float32
    assert_equal(dict(loaded.state_dict()), expected)


def _adapt(rank: int, world_size: int, folder: Path) -> None:
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(_llama(use_cache=False), config)
    reference = copy.deepcopy(model)
    sharded = _shard(model)
    models = sharded, reference
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]
    for step in range(3):
        batch = {"input_ids": (tokens := _tokens(10 * step + rank)), "labels": tokens}
        losses = [m(**batch).loss for m in models]
        torch.testing.assert_close(*losses)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, param in reference.named_parameters():
            grad = sharded.get_parameter(name).grad
            assert (grad is None) == (param.grad is None) == (not param.requires_grad), name
            if grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= world_size
                torch.testing.assert_close(grad.full_tensor(), param.grad)
                param.grad.copy_(grad.full_tensor())  # Adam amplifies differences of tiny gradients
        for optimizer in optimizers:
            optimizer.step()
    with pytest.raises(RuntimeError, check=coded("huggingface.parameters-are-sharded")):
        model.save_pretrained(folder)
    with mock.patch.object(huggingface, "gather_entries", side_effect=huggingface.gather_entries) as gathered:
        save_pretrained(sharded, folder)
    assert sorted(gathered.call_args.args[0]) == sorted(
        name for name, param in reference.named_parameters() if param.requires_grad
    )
    loaded = peft.PeftModel.from_pretrained(_llama(use_cache=False), folder)
    whole = full_state_dict(sharded)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
        torch.testing.assert_close(value, reference.state_dict()[name])
    # Resume: the same adapters, and the trainable parameters' optimizer.
    save_checkpoint(sharded, folder / "checkpoint", optimizers[0])
    resumed = _shard(peft.get_peft_model(_llama(use_cache=False), config))
    optimizer = torch.optim.AdamW([p for p in resumed.parameters() if p.requires_grad], lr=0.1)
    load_checkpoint(resumed, folder / "checkpoint", optimizer)
    assert_equal(full_state_dict(resumed), whole)
    assert len(optimizer.state_dict()["state"]) == len(optimizers[0].state_dict()["state"]) > 0


def test_adapters_are_trained_saved_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (make models)")
    ranks.run(_adapt, tmp_path)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@contextlib.contextmanager
def _launched(rank: int, world_size: int) -> Iterator[None]:
    """Let accelerate find the process group that exists, as after torchrun, and forget it afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    with launched(rank, world_size):
        forget()
        yield
        forget()


def _accelerate(rank: int, world_size: int, folder: Path) -> None:
    from accelerate import Accelerator

    with _launched(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == world_size and accelerator.distributed_type.value == "MULTI_CPU"
        model = _llama(use_cache=False)
        reference = copy.deepcopy(model)
        sharded = _shard(model)
        with pytest.raises(RuntimeError, check=coded("parameter.operator-needs-other-rows", "view")):
            accelerator.prepare(model)
        batches = [{"input_ids": _tokens(i)[0], "labels": _tokens(i)[0]} for i in range(8)]
        loader = torch.utils.data.DataLoader(batches, batch_size=1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (sharded, reference)]
        prepared, optimizer, loader = accelerator.prepare(sharded, optimizers[0], loader)
        assert prepared is sharded and optimizer is not optimizers[0]
        ours = []
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            ours.append(accelerator.gather(loss.detach()))
        for step in range(2):  # what all ranks see in one step
            losses = [
                reference(**{k: v[None] for k, v in batches[i].items()}).loss for i in range(4 * step, 4 * step + 4)
            ]
            (sum(losses) / 4).backward()
            torch.testing.assert_close(torch.cat(ours[2 * step : 2 * step + 2]), torch.stack(losses).detach())
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizers[1].step()
            optimizers[1].zero_grad()
        for name, value in full_state_dict(sharded).items():
            torch.testing.assert_close(value, reference.state_dict()[name])
        save_checkpoint(sharded, folder / "checkpoint", optimizer)
        before = copy.deepcopy(contents(sharded, optimizers[0]))
        update(sharded, optimizers[0])
        load_checkpoint(sharded, folder / "checkpoint", optimizer)
        assert_equal(contents(sharded, optimizers[0]), before)
    with _launched(rank, world_size):
        with pytest.raises(ValueError, check=coded("huggingface.accelerate-mixed-precision")):
            Accelerator(cpu=True, mixed_precision="bf16").prepare(_shard(_llama()))


def test_accelerate_trains_like_the_unsharded_model(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (make models)")
    ranks.run(_accelerate, tmp_path)


def _train_with_trainer(rank: int, world_size: int, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("example_trainer", EXAMPLES / "trainer.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = {"disable_tqdm": True, "max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    with _launched(rank, world_size):
        trainer = example.main(folder / "trained", **options)
        trained = full_state_dict(trainer.model)
        with mock.patch.object(example.ShardedTrainer, "train") as train:  # the newest checkpoint
            example.main(folder / "trained", **options)
        assert train.call_args == mock.call(resume_from_checkpoint=str(folder / "trained" / "checkpoint-4"))
        # An earlier one; the run replaces the newest.
        resumed = example.main(folder / "trained", resume=folder / "trained" / "checkpoint-2", **options)
        assert resumed.state.global_step == 4
        assert_equal(full_state_dict(resumed.model), trained)
        loaded = example.transformers.LlamaForCausalLM.from_pretrained(folder / "trained" / "checkpoint-4")
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, trained[name], rtol=0, atol=0)
        # The same run with Trainer itself, which uses DistributedDataParallel.
        with mock.patch.object(example.thunder, "jit", lambda model, transforms: model):
            with mock.patch.object(example, "ShardedTrainer", example.transformers.Trainer):
                reference = example.main(folder / "reference", save_strategy="no", **options)
        assert isinstance(reference.model_wrapped, nn.parallel.DistributedDataParallel)
        ours, theirs = ([log["loss"] for log in t.state.log_history if "loss" in log] for t in (trainer, reference))
        assert len(ours) == 4
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_trainer_trains_saves_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (make models)")
    ranks.run(_train_with_trainer, tmp_path)


def test_the_example_trains_saves_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (make models)")
    arguments = ("--standalone", "--nproc-per-node", "2", EXAMPLES / "huggingface.py")
    done = run_python("-m", "torch.distributed.run", *arguments, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 1
    assert "generated" in done.stdout
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
