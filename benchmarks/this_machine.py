"""Measure single pieces of a step on this machine, in one process or on its cores.

    python benchmarks/this_machine.py                      # as a ClusterSpec, with a rank for each core; a minute
    python benchmarks/this_machine.py kernels              # functions that torch's kernels run
    python benchmarks/this_machine.py kernels --rows 64 --width 16 --rounds 2
    python benchmarks/this_machine.py formats              # those of CommPolicy: 8 ranks, links of 1 to 100 Gbit/s, 32 MB
    python benchmarks/this_machine.py formats --numel 65536 --steps 4
    python benchmarks/this_machine.py formats --device cuda

* Cluster: each rank has one thread and one core, and gloo between them. The output, in a file, is for ``--cluster``.
* Kernels: each function runs forward and backward under ``thunder.jit`` with one thread, once with Thunder's default
  executors and once with ``torch_kernels`` and ``torch_elementwise`` before them, in turns. "Torch" is eager torch. Saved
  bytes are those of what forward keeps for backward, without the inputs, which are there anyway.
* Formats: nothing is sent. The time of a direction is that of its bytes at the rate of a link, and the least processor
  time of a thread that encodes what a rank sends and decodes what it receives, one after the other. Reductions are
  exchanges of pieces, which "exact" adds up, too. Errors are those of the mean gradient over ranks, each with its own
  batch, beside that of exact gradients, in a small GPT that learns bytes of text with AdamW: "error" of all
  elements together, "element" the median of each relative to itself, "lost" the share of elements that become zero,
  "loss" the mean of the last 20 losses of a training with them.
"""

from __future__ import annotations

import argparse
import operator
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS, Format, Wire
from thunder_fsdp_sched.extras.planning.clusters import GLOO, ClusterSpec, Protocol, as_json
from thunder_fsdp_sched.kernels.functions import with_kernels

import harness
import thunder
import torch
import torch.distributed as dist
from harness import Columns, matching, medians, ratio, table
from byte_gpt import GPT
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RATES = (1, 10, 25, 100)  # Gbit/s
EXACT = Format(torch.float32)


def least_seconds(
    call: Callable[[], object], *, calls: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the least mean time of a call among 7 runs of ``calls`` calls; disturbances only add time."""
    call()
    return min(harness.seconds_of(call, calls=calls, clock=clock) for _ in range(7))


#
# Cluster
#


def measure_cluster(arguments: argparse.Namespace) -> None:
    """Measure on all ranks, and print the means."""
    figures = measure_rank(dist.get_world_size())
    means = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        means /= dist.get_world_size()
        print(as_json(cluster_of(dict(zip(figures, means.tolist(), strict=True)), dist.get_world_size())))


def cluster_of(figures: dict[str, float], world_size: int) -> ClusterSpec:
    """Return the description of a node with these figures for each rank."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ClusterSpec(
        name=f"cpu-{world_size}core",
        source=f"measured on this machine: {world_size} ranks, a thread and a core each, gloo over the loopback device",
        devices_per_node=world_size,
        memory=pages // world_size,
        flops={dtype: figures[str(dtype)] for dtype in DTYPES},
        memory_bandwidth=figures["memory"],
        intra_node_bandwidth=figures["link"],
        inter_node_bandwidth=figures["link"],
        protocols=(Protocol(0.0, figures["hop"], figures["hop"]),),
        launch_overhead=figures["launch"],
        **GLOO,
    )


def measure_rank(world_size: int) -> dict[str, float]:
    """Return FLOP/s of each dtype, bytes/s of memory and of the link, and the seconds of a launch and a hop."""
    figures: dict[str, float] = {}
    for dtype in DTYPES:
        a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 2048).to(dtype)
        figures[str(dtype)] = 2 * 512 * 512 * 2048 / least_seconds(lambda a=a, b=b: torch.mm(a, b), calls=3)
    big = torch.ones(1 << 25)
    other = torch.empty_like(big)
    figures["memory"] = 2 * big.nbytes / least_seconds(lambda: other.copy_(big), calls=3)
    small, tiny = torch.ones(1), torch.empty(world_size)
    figures["launch"] = least_seconds(lambda: torch.neg(small), calls=1000)
    shards, hops = torch.ones(big.numel() // world_size), max(world_size - 1, 1)
    gather = dist.all_gather_into_tensor
    figures["hop"] = least_seconds(lambda: gather(tiny, small), calls=20) / hops
    figures["link"] = big.nbytes * hops / world_size / least_seconds(lambda: gather(big, shards), calls=3)
    return figures


#
# Kernels
#


def cases(rows: int, width: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions with their arguments; most work on ``rows x width`` elements."""
    x, w, b = torch.randn(rows, width), torch.randn(width), torch.randn(width)
    heads = [torch.randn(4, max(width // 64, 1), max(rows // 4, 1), 64) for _ in range(3)]
    images = torch.randn(2, 8, max(rows // 16, 2), max(width // 2, 2))
    targets = torch.randint(width, (rows,))
    pair = (x.bfloat16(), torch.randn(rows, width).bfloat16())
    activations = [
        "gelu",
        "silu",
        "mish",
        "elu",
        "leaky_relu",
        "hardswish",
        "hardtanh",
        "softplus",
        "logsigmoid",
        "sigmoid",
        "glu",
    ]
    on_x = {name: getattr(F, name) for name in activations}
    on_x |= {f.__name__: partial(f, dim=-1) for f in (F.softmax, F.log_softmax, torch.logsumexp)}
    return {
        "layer_norm": (F.layer_norm, (x, (width,), w, b)),
        "group_norm": (F.group_norm, (images, 4, torch.randn(8), torch.randn(8))),
        **{name: (function, (x,)) for name, function in on_x.items()},
        "cross_entropy": (F.cross_entropy, (x, targets)),
        "addmm": (torch.addmm, (x[0], x, torch.randn(x.shape[1], x.shape[1]))),
        "mse_loss": (F.mse_loss, (x, torch.randn(rows, width))),
        "embedding": (lambda weight, rows: F.embedding(rows, weight), (torch.randn(1000, width), targets % 1000)),
        "scaled_dot_product_attention": (partial(F.scaled_dot_product_attention, is_causal=True), tuple(heads)),
        "avg_pool2d": (partial(F.avg_pool2d, kernel_size=2), (images,)),
        "interpolate": (partial(F.interpolate, scale_factor=2.0), (images,)),
        "a + b, bfloat16": (operator.add, pair),
        "a * b, bfloat16": (operator.mul, pair),
        "a * 0.3, bfloat16": (lambda a: a * 0.3, pair[:1]),
        "silu(a) * b, bfloat16": (lambda a, b: F.silu(a) * b, pair),
        "interpolate, bilinear": (partial(F.interpolate, scale_factor=2.0, mode="bilinear"), (images,)),
    }


def forward_and_backward(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Run forward and backward, and return the seconds."""
    inputs = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]

    def work() -> None:
        result = function(*inputs)
        result.backward(torch.ones_like(result))

    return harness.seconds_of(work)


def saved_bytes(jitted: Any) -> int:
    """Return the bytes that the compiled forward saves, without its inputs."""
    trace = thunder.last_traces(jitted)[-1]
    inputs = {p.name for p in tree_leaves(trace.args)}
    saved = {p.name: p for p in tree_leaves(trace.output[1]) if hasattr(p, "numel") and p.name not in inputs}
    return sum(p.numel() * p.dtype.bytes for p in saved.values())


def compare_kernels(arguments: argparse.Namespace) -> None:
    figures = {}
    default = thunder.get_default_executors()
    for name, (function, args) in matching(cases(arguments.rows, arguments.width), arguments.only).items():
        # A function of its own each, because Thunder looks up how `thunder.torch` represents a function that it knows.
        call = lambda *a, function=function: function(*a)  # noqa: E731
        systems = {
            "torch": function,
            "thunder": thunder.jit(call, executors=default),
            "whole": thunder.jit(call, executors=with_kernels(default, {"cpu"})),
        }
        runs = {key: partial(forward_and_backward, system, args) for key, system in systems.items()}
        for _ in range(2):
            for start in runs.values():
                start()
        seconds = harness.in_turns(runs, arguments.rounds)
        figures[name] = medians(seconds, unit=1e-3) | {
            "of_thunder": ratio(seconds["whole"], seconds["thunder"]),
            "thunder_saves": saved_bytes(systems["thunder"]),
            "whole_saves": saved_bytes(systems["whole"]),
        }
    columns: Columns = {
        **{f"{name}, ms": (name.lower(), ".2f") for name in ("torch", "Thunder", "whole")},
        "of Thunder": ("of_thunder", ".2f"),
        **{f"{name} saves": (f"{name.lower()}_saves", harness.show_nbytes) for name in ("Thunder", "whole")},
    }
    print(table(figures, columns))
    harness.save(arguments, "kernels", figures=figures)


#
# Formats
#


def on_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def times(form: Format, arguments: argparse.Namespace) -> dict[str, float]:
    """Return bytes an element, and seconds of a gather and of a reduction on links of each rate."""
    numel, ranks, block = arguments.numel, arguments.ranks, arguments.block
    seconds = partial(least_seconds, clock=time.thread_time if arguments.device == "cpu" else on_gpu)
    wire = Wire.of([(numel // ranks, form)], block)
    whole, own = torch.randn(ranks, numel // ranks), torch.empty(1, numel // ranks)
    received = torch.empty(ranks, wire.nbytes, dtype=torch.uint8)
    encoded = form is not EXACT
    encode_all = seconds(lambda: wire.encode([whole], received)) * encoded
    add_up = seconds(lambda: wire.decode_mean(received, [own]))
    decode_all = seconds(lambda: wire.decode(received, [whole])) * encoded
    computed = {"gather": encode_all / ranks + decode_all, "reduction": encode_all + add_up}
    sent = wire.nbytes * (ranks - 1)
    found = {f"{way} {rate}": s + 8 * sent / (rate * 1e9) for way, s in computed.items() for rate in RATES}
    return {"bytes": wire.nbytes * ranks / numel, **{way: 1e3 * s for way, s in computed.items()}, **{
        name: 1e3 * s for name, s in found.items()
    }}  # fmt: skip


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
    text = torch.tensor(list(Path(__file__).with_name("README.md").read_bytes()))
    model = GPT(blocks=2, width=64, heads=4, length=64)
    params = list(model.parameters())
    matrices = torch.cat([torch.full((p.numel(),), p.ndim > 1) for p in params])  # the others travel exactly
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    lost = torch.zeros(arguments.ranks, int(matrices.sum())) if feedback else None
    losses, errors = [], []
    for _ in range(arguments.steps):
        rows = []
        for _ in range(arguments.ranks):
            starts = torch.randint(len(text) - 65, (4,))
            tokens = torch.stack([text[at : at + 65] for at in starts])
            loss = model(tokens[:, :-1], tokens[:, 1:])
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


def compare_formats(arguments: argparse.Namespace) -> None:
    torch.set_default_device(arguments.device)
    forms = {"exact": EXACT, **FORMATS}
    rows = {name: times(form, arguments) for name, form in forms.items()}
    for way in ("gather", "reduction"):
        at = {f"{rate} Gbit/s": (f"{way} {rate}", ",.1f") for rate in RATES}
        print(table(rows, {"bytes": ("bytes", ".2f"), f"{way}: encode, decode ms": (way, ",.1f"), **at}), flush=True)
    trained = {name: train(form, arguments) for name, form in forms.items()}
    trained |= {f"{name}, feedback": train(FORMATS[name], arguments, feedback=True) for name in FORMATS}
    print(table(trained, {name: (name, ".3f" if name == "loss" else ".4f") for name in trained["int8"]}))


PARTS = {"kernels": compare_kernels, "formats": compare_formats}

if __name__ == "__main__":
    parser = harness.options(__doc__)
    parser.add_argument("part", nargs="?", choices=("cluster", *PARTS), default="cluster")
    parser.add_argument("--rows", type=int, default=512, help="of kernels")
    parser.add_argument("--width", type=int, default=1024, help="of kernels")
    parser.add_argument("--numel", type=int, default=1 << 23, help="elements of a bucket, of formats")
    parser.add_argument("--block", type=int, default=128, help="of formats")
    parser.add_argument("--steps", type=int, default=150, help="of training, of formats")
    parser.add_argument("--device", default="cpu", help="where formats are encoded")
    parser.set_defaults(ranks=8, no_limit=True)
    given = parser.parse_args()
    if given.part == "cluster":
        given.ranks = len(os.sched_getaffinity(0))
        harness.run_on_ranks(__file__, given, measure_cluster)
    else:
        torch.set_num_threads(1)
        PARTS[given.part](given)
