"""``python benchmarks/gpu.py first`` on CPUs: everything that does not need a GPU, in real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from forked import run_python
from gpu_cases import REFERENCE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_stand_in_run_on_cpus_trains_simulates_and_reports_that_there_is_no_gpu(tmp_path: Path) -> None:
    """Workers, training, digests, the page."""
    command = ["-W", "ignore", str(BENCHMARKS / "gpu.py"), "first", "--stand-in"]
    command += ["--cases", "zero3 (flat|symmetric_memory)$", "--only", "alone|shared|profile", "--save", str(tmp_path)]
    command += ["--blocks", "0", "--width", "64", "--length", "8", "--batch", "2"]
    done = run_python(*command, cwd=tmp_path, timeout=1800)
    assert done.returncode == 1, done.stderr  # the profiler cannot see a GPU
    records = json.loads((tmp_path / "records.json").read_text())
    for step in ("alone", "shared"):
        flat = records[step]["zero3 flat"]
        assert flat["status"] == "ok", flat
        assert len(set(flat["digests"])) == 1
        assert flat["difference"] < 1e-4
        assert records[step]["zero3 symmetric_memory"]["status"] == "refused"
    assert (
        records["alone"]["zero3 flat"]["digests"] == records["alone"][REFERENCE]["digests"]
    )  # one rank has the bits of the unsharded model
    assert "nothing run on the GPU" in records["profile"]["zero3 flat"]["measured"]["error"]
    predicted = records["profile"]["zero3 flat"]["by profile"]
    assert predicted["order"][0] == "fsdp_all_gather(embedding)"
    text = (tmp_path / "page.txt").read_text()
    assert done.stdout == text
    assert "1 of 8 failed, 3 were refused with a reason" in text
    assert "STAND-IN" in text
