"""Compare the formats of ``CommPolicy``: bytes on the wire, time to encode and decode on one core, and errors.

    python benchmarks/formats.py                           # 8 ranks, links of 1 to 100 Gbit/s, 32 MB of float32
    python benchmarks/formats.py --numel 65536 --steps 4   # only to see that it runs

Nothing is sent. The time of a direction is that of its bytes at the rate of a link, and the least processor time of a thread
that encodes what a rank sends and decodes what it receives, one after the other. Reductions are exchanges of pieces, which
"exact" adds up, too.

Errors are those of the mean gradient over ranks, each with its own batch, beside that of exact gradients, in a small
transformer that learns bytes of text with AdamW: "error" of all elements together, "element" the median of each relative to
itself, "lost" the share of elements that become zero, "loss" the mean of the last 20 losses of a training with them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS, Format, Wire

import torch
from harness import table
from torch import nn
from torch.nn.functional import cross_entropy

RATES = (1, 10, 25, 100)  # Gbit/s
EXACT = Format(torch.float32)


def processor_seconds(call: Callable[[], object], rounds: int = 7) -> float:
    def once() -> float:
        started = time.thread_time()
        call()
        return time.thread_time() - started

    return min(once() for _ in range(rounds))


def times(form: Format, numel: int, ranks: int, block: int) -> dict[str, float]:
    """Return bytes an element, and seconds of a gather and of a reduction on links of each rate."""
    wire = Wire.of([(numel // ranks, form)], block)
    whole, own = torch.randn(ranks, numel // ranks), torch.empty(1, numel // ranks)
    received = torch.empty(ranks, wire.nbytes, dtype=torch.uint8)
    encoded = form is not EXACT
    encode_all = processor_seconds(lambda: wire.encode([whole], received)) * encoded
    add_up = processor_seconds(lambda: wire.decode_mean(received, [own]))
    decode_all = processor_seconds(lambda: wire.decode(received, [whole])) * encoded
    computed = {"gather": encode_all / ranks + decode_all, "reduction": encode_all + add_up}
    sent = wire.nbytes * (ranks - 1)
    found = {f"{way} {rate}": s + 8 * sent / (rate * 1e9) for way, s in computed.items() for rate in RATES}
    return {"bytes": wire.nbytes * ranks / numel, **{way: 1e3 * s for way, s in computed.items()}, **{
        name: 1e3 * seconds for name, seconds in found.items()
    }}  # fmt: skip


class Model(nn.Module):
    def __init__(self, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1]) + self.positions
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def mean_of(grads: torch.Tensor, form: Format, block: int, lost: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of the gradients of all ranks as they reduce it, and update what rounding has lost of them."""
    ranks, numel = grads.shape
    wire = Wire.of([(numel, form)], block)
    received, found = torch.empty(ranks, wire.nbytes, dtype=torch.uint8), torch.empty(1, numel)
    sent = grads if lost is None else grads + lost
    wire.encode([sent], received)
    wire.decode_mean(received, [found])
    if lost is not None:
        decoded = torch.empty_like(sent)
        wire.decode(received, [decoded])
        lost.copy_(sent - decoded)
    return found[0]


def train(form: Format, arguments: argparse.Namespace, *, feedback: bool = False) -> dict[str, float]:
    """Train with encoded gradients, and return the last losses and the mean errors of the gradients on the way."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).with_name("README.md").read_bytes()), dtype=torch.uint8).long()
    model = Model()
    params = list(model.parameters())
    matrices = torch.cat([torch.full((p.numel(),), p.ndim > 1) for p in params])  # the others travel exactly
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    lost = torch.zeros(arguments.ranks, int(matrices.sum())) if feedback else None
    losses, errors = [], []
    for _ in range(arguments.steps):
        rows = []
        for _ in range(arguments.ranks):
            starts = torch.randint(len(text) - 65, (4,))
            loss = model(torch.stack([text[at : at + 65] for at in starts]))
            losses.append(loss.item())
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
        grads = torch.stack(rows)
        exact = grads.mean(0)
        found = exact.clone()
        found[matrices] = mean_of(grads[:, matrices], form, arguments.block, lost)
        g, q = exact[matrices], found[matrices]
        seen, difference = g != 0, q - g
        element = (difference[seen] / g[seen]).abs().median()
        errors.append([difference.norm() / g.norm(), element, (q[seen] == 0).float().mean()])
        for p, piece in zip(params, found.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)
        optimizer.step()
    error, element, zero = torch.tensor(errors).mean(0).tolist()
    last = statistics.fmean(losses[-20 * arguments.ranks :])
    return {"error": error, "element": element, "lost": zero, "loss": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1 << 23, help="elements of a bucket")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150, help="steps of training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    forms = {"exact": EXACT, **FORMATS}
    rows = {name: times(form, arguments.numel, arguments.ranks, arguments.block) for name, form in forms.items()}
    for way in ("gather", "reduction"):
        at = {f"{rate} Gbit/s": (f"{way} {rate}", ",.1f") for rate in RATES}
        print(table(rows, {"bytes": ("bytes", ".2f"), f"{way}: encode, decode ms": (way, ",.1f"), **at}), flush=True)
    trained = {name: train(form, arguments) for name, form in forms.items()}
    trained |= {f"{name}, feedback": train(FORMATS[name], arguments, feedback=True) for name in FORMATS}
    columns = {
        "error": ("error", ".4f"),
        "element": ("element", ".4f"),
        "lost": ("lost", ".4f"),
        "loss": ("loss", ".3f"),
    }
    print(table(trained, columns))


if __name__ == "__main__":
    main()
