"""Ranks are processes of their own, each with its own hash seed, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import thunder_fsdp_sched

_SCRIPT = """
import sys
import thunder_fsdp_sched as tfs
import thunder, torch
import torch.distributed as dist

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, x):
        return torch.einsum("bti,eij->btej", x, self.experts)

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = thunder.jit(Experts(), transforms=[tfs.fsdp()])
try:
    print(float(model(torch.ones(1, 3, 4)).sum()), flush=True)
except RuntimeError as error:
    print(error, flush=True)
"""


def test_an_operator_that_depends_on_the_order_of_sets_is_an_error_that_names_the_hash_seed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    root = str(Path(thunder_fsdp_sched.__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root, "PYTHONHASHSEED": seed},
        )
        for rank, seed in enumerate(("0", "1"))  # which order {"b", "t"} differently
    ]
    for process in processes:
        output, _ = process.communicate(timeout=400)
        assert "the computations differ" in output and "PYTHONHASHSEED=0" in output, output
