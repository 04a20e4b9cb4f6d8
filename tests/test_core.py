"""The core without extras: a copy of the package without their folder trains, and a default step loads none of them.

Nor does it load what only uncommon programs and options need of the core.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import thunder_fsdp_sched  # before thunder

PROGRAM = """
    import sys
    from pathlib import Path

    import thunder_fsdp_sched as tfs
    import thunder
    import torch
    import torch.distributed as dist

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    assert Path(tfs.__file__).is_relative_to(folder) and not (folder / "thunder_fsdp_sched" / "extras").exists()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    model = thunder.jit(torch.nn.Sequential(*layers), transforms=[tfs.fsdp()])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(3):
        loss = model(torch.full((5, 4), 1.0 + rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not [name for name in sys.modules if name.startswith("thunder_fsdp_sched.extras")]
    uncommon = "capture.tensor_attributes", "capture.unknown_numbers", "ir.kept_slots", "runtime.row_elements"
    assert not {f"thunder_fsdp_sched.{name}" for name in uncommon} & sys.modules.keys()
    dist.destroy_process_group()
"""


def test_a_default_step_needs_no_extra(tmp_path: Path) -> None:
    package = Path(thunder_fsdp_sched.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("extras", "__pycache__"))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ranks = [
        subprocess.Popen(
            [sys.executable, "program.py", str(tmp_path), str(rank)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-4000:]
