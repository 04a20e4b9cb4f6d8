"""Which calls compile: the table in docs/compiling.md."""

from __future__ import annotations

import re
from pathlib import Path

import thunder_fsdp_sched as tfs  # before thunder

import thunder
import torch
from ranks import on_ranks

TABLE = (Path(__file__).resolve().parents[1] / "docs" / "compiling.md").read_text()


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(self.first(x)) * scale
        return y if mask is None else y * mask


@on_ranks()
def test_calls_compile_as_the_table_says() -> None:
    torch.manual_seed(0)
    transform = tfs.fsdp()
    model = thunder.jit(_Scaled(), transforms=[transform])
    x = torch.randn(2, 4)
    found: dict[str, list[int]] = {}

    def call(row: str, *args: torch.Tensor | float, grad: bool = True, times: int = 1) -> None:
        before = len(transform.compiled)
        for _ in range(times):
            with torch.set_grad_enabled(grad):
                model(*args)
        found.setdefault(row, []).append(len(transform.compiled) - before)

    call("the first one", x)
    call("the same shapes, other values", torch.randn(2, 4))
    call("inputs of another shape", torch.randn(3, 4), times=2)
    with model.no_sync():
        call("in `model.no_sync()`", x, times=2)
    call("without gradients", x, grad=False, times=2)
    with torch.inference_mode():
        call("without gradients", x, grad=False)
    model.eval()
    call("after `model.eval()`", x, times=2)
    call("after `model.eval()`", x, grad=False, times=2)
    model.train()
    call("back in `model.train()`", x)
    call("another Python number", x, 2.0)
    call("another Python number", x, 3.0)
    call("another Python number", x, 2.0)
    call("an argument that was left out", x, 1.0, torch.ones(2, 4))
    call("another tensor that requires gradients", x.clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        call("under `torch.autocast`", x)
    with tfs.eager(model) as module:
        before = len(transform.compiled)
        module(torch.randn(9, 4))
        found["`with tfs.eager(model)"] = [len(transform.compiled) - before]
    model.get_parameter("first.weight").requires_grad_(False)
    call("another tensor that requires gradients", x)
    expected = {row: [1] for row in found} | {
        "the same shapes, other values": [0],
        "without gradients": [1, 0],
        "after `model.eval()`": [1, 1],
        "back in `model.train()`": [0],
        "another Python number": [1, 1, 0],
        "another tensor that requires gradients": [1, 1],
        "`with tfs.eager(model)": [0],
    }
    assert found == expected
    rows = dict(re.findall(r"^\| (.*?) \| (yes|no)", TABLE, re.MULTILINE))
    for row, counts in found.items():
        [says] = [answer for text, answer in rows.items() if text.startswith(row)]
        assert says == ("yes" if any(counts) else "no"), row
    assert len(rows) == len(found)
