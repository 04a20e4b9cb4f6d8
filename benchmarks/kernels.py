"""Compare functions that ``torch_kernels`` keeps whole with Thunder's decomposition of them, in one process.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --rows 64 --width 16 --rounds 2       # only to see that it runs

Each function runs forward and backward under ``thunder.jit`` with one thread, once with Thunder's default executors and once
with ``torch_kernels`` before them, in turns. "Torch" is eager torch. Saved bytes are those of what forward keeps for
backward, without the inputs, which are there anyway.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.kernels.executor import executor

import harness
import thunder
import torch
from harness import Columns, matching, medians, ratio
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves


def cases(rows: int, width: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return functions with their arguments; most work on ``rows x width`` elements."""
    x, w, b = torch.randn(rows, width), torch.randn(width), torch.randn(width)
    heads = [torch.randn(4, max(width // 64, 1), max(rows // 4, 1), 64) for _ in range(3)]
    images = torch.randn(2, 8, max(rows // 16, 2), max(width // 2, 2))
    targets = torch.randint(width, (rows,))
    on_x = {
        "gelu": F.gelu,
        "silu": F.silu,
        "mish": F.mish,
        "elu": F.elu,
        "leaky_relu": F.leaky_relu,
        "hardswish": F.hardswish,
        "hardtanh": F.hardtanh,
        "softplus": F.softplus,
        "logsigmoid": F.logsigmoid,
        "sigmoid": torch.sigmoid,
        "glu": F.glu,
        "softmax": partial(F.softmax, dim=-1),
        "log_softmax": partial(F.log_softmax, dim=-1),
        "logsumexp": partial(torch.logsumexp, dim=-1),
    }
    return {
        "layer_norm": (F.layer_norm, (x, (width,), w, b)),
        "group_norm": (F.group_norm, (images, 4, torch.randn(8), torch.randn(8))),
        **{name: (function, (x,)) for name, function in on_x.items()},
        "cross_entropy": (F.cross_entropy, (x, targets)),
        "mse_loss": (F.mse_loss, (x, torch.randn(rows, width))),
        "embedding": (lambda weight, rows: F.embedding(rows, weight), (torch.randn(1000, width), targets % 1000)),
        "scaled_dot_product_attention": (partial(F.scaled_dot_product_attention, is_causal=True), tuple(heads)),
        "avg_pool2d": (partial(F.avg_pool2d, kernel_size=2), (images,)),
        "interpolate": (partial(F.interpolate, scale_factor=2.0), (images,)),
        "interpolate, bilinear": (partial(F.interpolate, scale_factor=2.0, mode="bilinear"), (images,)),
    }


def run(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
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


COLUMNS: Columns = {
    "torch, ms": ("torch", ".2f"),
    "Thunder, ms": ("thunder", ".2f"),
    "whole, ms": ("whole", ".2f"),
    "of Thunder": ("of_thunder", ".2f"),
    "Thunder saves": ("thunder_saves", harness.show_nbytes),
    "whole saves": ("whole_saves", harness.show_nbytes),
}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    figures = {}
    default = thunder.get_default_executors()
    for name, (function, args) in matching(cases(arguments.rows, arguments.width), arguments.only).items():
        # A function of its own each, because Thunder looks up how `thunder.torch` represents a function that it knows.
        call = lambda *a, function=function: function(*a)  # noqa: E731
        systems = {
            "torch": function,
            "thunder": thunder.jit(call, executors=default),
            "whole": thunder.jit(call, executors=(executor, *default)),
        }
        runs = {key: partial(run, system, args) for key, system in systems.items()}
        for _ in range(2):
            for start in runs.values():
                start()
        seconds = harness.in_turns(runs, arguments.rounds)
        figures[name] = medians(seconds, unit=1e-3) | {
            "of_thunder": ratio(seconds["whole"], seconds["thunder"]),
            "thunder_saves": saved_bytes(systems["thunder"]),
            "whole_saves": saved_bytes(systems["whole"]),
        }
    return figures


if __name__ == "__main__":
    parser = harness.options(__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(given)
    print(harness.table(figures, COLUMNS))
    harness.save(given, "kernels", figures=figures)
