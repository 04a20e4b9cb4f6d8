"""The worker processes of ``ranks.py``: results, errors and hangs; and the commands that run in forked processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_python
from ranks import RankError, Ranks


def _sum(rank: int, world_size: int, offset: int, *, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total * factor


def _fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_0(rank: int, world_size: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def test_failing_dying_and_hanging_ranks_are_reported_and_replaced(ranks: Ranks) -> None:
    assert ranks.run(_sum, 3, factor=2) == [(0, torch.tensor([14])), (1, torch.tensor([14]))]
    with pytest.raises(RankError, match=r"(?s)--- rank 1 failed.*ValueError: only here"):
        ranks.run(_fail_on_rank_1)
    with pytest.raises(RankError, match="--- rank 1 failed\nthe process died, exit code 7"):
        ranks.run(_die_on_rank_1)
    with pytest.raises(RankError, match=r"(?s)hung: no answer within 8 s.*--- rank 0 did not return.*_hang_on_rank_0"):
        ranks.run(_hang_on_rank_0, timeout=8)
    assert [rank for rank, _ in ranks.run(_sum, 0, factor=1)] == [0, 1]


def _make_groups(rank: int, world_size: int) -> None:
    for _ in range(3):
        dist.barrier(group=dist.new_group())


def _count_groups(rank: int, world_size: int) -> tuple[int, int]:
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return len(dist.distributed_c10d._world.pg_map), sum("gloo_tcp_loop" in name for name in threads)


def test_workers_keep_no_group_and_no_thread_of_one(ranks: Ranks) -> None:
    before = ranks.run(_count_groups)
    ranks.run(_make_groups)
    assert ranks.run(_count_groups) == before
    assert [groups for groups, _ in before] == [1, 1]


def _has_preloaded(rank: int, world_size: int) -> bool:
    return "preloaded" in sys.modules


def test_workers_are_forked_off_a_server_that_has_imported_thunder(ranks: Ranks) -> None:
    assert all(ranks.run(_has_preloaded))


PROGRAM = """
import os, subprocess, sys
print("thunder" in sys.modules, "preloaded" in sys.modules, __name__, sys.argv[1:], os.environ.get("WHO"), os.getcwd())
print("error", file=sys.stderr)
if sys.argv[1] == "outer":
    command = [sys.executable, "-W", "ignore", "program.py", "inner"]
    inner = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "WHO": "child"})
    print(inner.returncode, inner.stdout, inner.stderr)
    print(subprocess.run(["echo", "another program"], capture_output=True, text=True).stdout)
    sys.exit("ends with a message")
sys.exit(3)
"""


def test_a_command_runs_as_in_an_interpreter_and_so_do_those_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python("-u", "program.py", "outer", cwd=tmp_path, env={"WHO": "parent"})
    assert done.stdout.splitlines() == [
        f"True True __main__ ['outer'] parent {tmp_path}",
        f"3 True True __main__ ['inner'] child {tmp_path}",
        *(" error", "", "another program", ""),
    ]
    assert (done.returncode, done.stderr) == (1, "error\nends with a message\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import time\nprint(__name__, flush=True)\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_python("-m", "package", cwd=tmp_path, timeout=2)
    assert caught.value.stdout == "__main__\n"
    (tmp_path / "program.py").write_text("1 / 0")
    done = run_python("program.py", cwd=tmp_path)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
