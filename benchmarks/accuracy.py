"""Compare the loss of training with every wire format to that of exact training, on real text.

    python benchmarks/accuracy.py --save accuracy                                  # 2 ranks, all formats, 3 seeds
    python benchmarks/accuracy.py --save accuracy --ranks 4 --only 'gather int8$|reduce int8$|reduce int8, feedback$'

A GPT of bytes learns the sources of Python's standard library; every tenth file is for validation. All formats start with
the same weights and see the same batches. A batch has as many sequences on 4 ranks as on 2. What the file in ``--save``
contains already is not trained again, so a run can be continued, and extended by other ``--ranks`` and ``--rate``.

* Loss: the mean of the validation batches, in nats per byte, with the decoded parameters that training computes with.
* Against exact: that loss divided by the loss of exact training with the same seed, less 1; mean and range over seeds.
* Saved: the same with the exact values of the parameters, which checkpoints contain.
* Limit: for the magnitude of the mean, in percent.

Three rows are yardsticks. "Exact, reordered" has the sequences of each batch in another order, which changes only the order
of sums. "Exact, perturbed" starts with weights that differ by 0.1 %. "Exact, noisy" computes in each step with weights that
differ by 2.6 % at random, as much as float8 rounds them (``costs.py formats``).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from thunder_fsdp_sched import CommPolicy, eager, fsdp, full_state_dict
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS

import harness
import thunder
import torch
import torch.distributed as dist
from byte_gpt import GPT, VOCABULARY
from torch.optim.lr_scheduler import OneCycleLR

BLOCKS, WIDTH, LENGTH, BATCH, VALIDATION = 2, 64, 64, 16, 64
"""The shape of the GPT, the sequences in a batch of all ranks, and the number of batches to validate with."""

BUCKET = 25_000_000
"""Bytes of a bucket: the whole model's, so that a step takes less time of the host."""

PARTS = 20
"""Number of means of the training loss that a run keeps."""

EXACT, REORDERED, PERTURBED, NOISY = "exact", "exact, reordered", "exact, perturbed", "exact, noisy"
NONE_EXEMPT = ", none exempt"

LIMITS = {
    r"\w+ bfloat16(, feedback)?": 0.1,
    r"gather (float8_e4m3fn|int8)": 0.5,
    r"reduce int8(, feedback)?": 1.0,
}
"""For policies whose names match, the limit (percent) of the loss against that of exact training."""

Trained = dict[str, dict[str, dict[str, Any]]]
"""For each policy and seed, the result of :func:`train`."""


COLUMNS: harness.Columns = {
    "loss": ("loss", ".4f"),
    "against exact, %": ("against", lambda of_seeds: f"{fmean(of_seeds):+.3f}"),
    "seeds": ("against", lambda of_seeds: f"{min(of_seeds):+.3f} to {max(of_seeds):+.3f} ({len(of_seeds)})"),
    "saved, %": ("saved", lambda of_seeds: f"{fmean(of_seeds):+.3f}"),
    "limit, %": ("limit", "g"),
}


def policies() -> dict[str, CommPolicy | None]:
    """Return every way to train, keyed by its name in tables."""
    made: dict[str, CommPolicy | None] = dict.fromkeys((EXACT, REORDERED, PERTURBED, NOISY))
    for suffix, policy in {"": CommPolicy(), NONE_EXEMPT: CommPolicy(min_ndim=0)}.items():
        for form in FORMATS:
            made[f"gather {form}{suffix}"] = replace(policy, gather=form)
        for form in FORMATS:
            made[f"reduce {form}{suffix}"] = replace(policy, reduce=form)
            made[f"reduce {form}, feedback{suffix}"] = replace(policy, reduce=form, error_feedback=True)
    return made | {f"gather int8, reduce {form}": CommPolicy("int8", form) for form in ("bfloat16", "int8")}


def standard_library(*, held_out: bool) -> torch.Tensor:
    """Return the bytes to train on, or those to validate with."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [path for path in files if not {"site-packages", "test", "tests"}.intersection(path.parts)]
    chosen = (path.read_bytes() for number, path in enumerate(files) if (number % 10 == 0) is held_out)
    return torch.frombuffer(bytearray().join(chosen), dtype=torch.uint8)


def entropy(training: torch.Tensor, validation: torch.Tensor) -> float:
    """Return the loss of a model that knows nothing but the frequencies of bytes in training."""
    frequencies = training.bincount(minlength=VOCABULARY) + 1.0
    return -(frequencies / frequencies.sum()).log()[validation.long()].mean().item()


def batches(text: torch.Tensor, number: int, seed: int) -> torch.Tensor:
    """Return random sequences, each with the byte that follows it."""
    starts = torch.randint(len(text) - LENGTH, (number, BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(LENGTH + 1)].long()


def of_this_rank(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's tokens and targets of a batch of all ranks."""
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def run(arguments: argparse.Namespace) -> None:
    text = standard_library(held_out=False), standard_library(held_out=True)
    path = (arguments.save or Path()) / "accuracy.json"
    saved: dict[str, Trained] = json.loads(path.read_text())["ranks"] if arguments.save and path.exists() else {}
    dist.barrier()  # all ranks have read the file
    trained = saved.setdefault(f"{arguments.ranks} ranks, rate {arguments.rate:g}", {})
    for seed in range(arguments.seeds):
        for name, policy in policies().items():
            of_name = trained.setdefault(name, {})
            if str(seed) in of_name or not (policy is None or re.search(arguments.only, name)):
                continue
            of_name[str(seed)] = train(name, seed, arguments, text)
            harness.say(f"seed {seed}, {name}: {of_name[str(seed)]['loss']:.4f}")
            gc.collect()
            if dist.get_rank() == 0:
                harness.save(arguments, "accuracy", ranks=saved)
    if dist.get_rank() == 0:
        figures = figures_of(trained)
        print(f"Loss with the frequencies of bytes alone: {entropy(*text):.3f}\n\n{harness.table(figures, COLUMNS)}\n")


def train(name: str, seed: int, arguments: argparse.Namespace, text: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Train a model; return its validation losses, and how its training loss fell."""

    def model() -> GPT:
        torch.manual_seed(seed)
        return GPT(blocks=BLOCKS, width=WIDTH, heads=WIDTH // 32, length=LENGTH)

    module = model()
    if name == PERTURBED:
        for parameter in module.parameters():
            parameter.data *= 1 + 0.001 * torch.randn_like(parameter)
    jitted = thunder.jit(module, transforms=[fsdp(comm_policy=policies()[name], bucketing_strategy=BUCKET)])
    optimizer = torch.optim.AdamW(jitted.parameters(), lr=arguments.rate, fused=True)
    shape = {"total_steps": arguments.steps, "pct_start": 0.1, "cycle_momentum": False}
    schedule = OneCycleLR(optimizer, arguments.rate, **shape)
    losses = []
    for batch in batches(text[0], arguments.steps, seed):
        with noise(jitted, share=0.026 * (name == NOISY)):
            loss = jitted(*of_this_rank(batch.roll(1, 0) if name == REORDERED else batch))
            loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held_out = batches(text[1], VALIDATION, 0)
    with eager(jitted, reshard_after_forward=False) as decoded:
        loss = validate(decoded, held_out)
    saved = model()
    saved.load_state_dict(full_state_dict(jitted))
    parts = [part.mean().item() for part in torch.tensor(losses).tensor_split(PARTS)]
    return {"loss": loss, "saved": validate(saved, held_out), "training": mean_over_ranks(parts)}


@contextmanager
def noise(module: torch.nn.Module, share: float) -> Iterator[None]:
    """Let each weight differ from its value by this share, times a normal number."""
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1 and share]
    kept = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            noisy = weight.detach().clone()
            rows = noisy.to_local()
            rows *= 1 + share * torch.randn_like(rows)
            weight.copy_(noisy)
    yield
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)


@torch.no_grad()
def validate(module: Callable[..., torch.Tensor], held_out: torch.Tensor) -> float:
    """Return the mean loss of batches, of which each rank computes its part."""
    return mean_over_ranks([fmean(module(*of_this_rank(batch)).item() for batch in held_out)])[0]


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def figures_of(trained: Trained) -> dict[str, dict[str, Any]]:
    """Return the figures of each row of a table, in percent."""
    figures = {}
    for name in filter(trained.get, policies()):
        limits = (limit for pattern, limit in LIMITS.items() if re.fullmatch(f"{pattern}({NONE_EXEMPT})?", name))
        of_seeds = [(one, trained[EXACT][seed]["loss"]) for seed, one in trained[name].items()]
        figures[name] = {
            "loss": fmean(one["loss"] for one, _ in of_seeds),
            "against": [100 * (one["loss"] / exact - 1) for one, exact in of_seeds],
            "saved": [100 * (one["saved"] / exact - 1) for one, exact in of_seeds],
            "limit": next(limits, None),
        }
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", metavar="REGEX", default="", help="only matching formats, and exact training")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to write all figures as JSON")
    harness.run_on_ranks(__file__, parser.parse_args(namespace=argparse.Namespace(no_limit=True)), run)
