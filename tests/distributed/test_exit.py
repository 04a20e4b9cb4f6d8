"""A process that has used gloo exits with its own exit code, even if gloo's threads release their tensors late."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import thunder_fsdp_sched

import pytest

_SCRIPT = """
import atexit, os, sys, threading
import thunder_fsdp_sched as tfs
from thunder_fsdp_sched.runtime import ops
from thunder_fsdp_sched.runtime.memory import slot_bytes
import thunder, torch, torch.distributed as dist
from datetime import timedelta

def rank_of():
    '''In each of two children its rank; the parent returns when they have ended.'''
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            return rank
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(*codes, flush=True)
    return None

def run_last(how, rank):
    '''An exit handler of the user, registered before this package's, so that it runs afterwards.'''
    if how == "failed" and rank == 0 and sys.last_traceback.tb_frame.f_globals["__name__"] != "__main__":
        os._exit(9)

def run(rank, store, how):
    atexit.register(run_last, how, rank)
    main = threading.get_native_id()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    transform = tfs.fsdp(bucketing_strategy="layer", ranks=tfs.Ranks(separate_reduce_scatter_group=how == "twin"))
    model = thunder.jit(torch.nn.Sequential(torch.nn.Linear(64, 64)), transforms=[transform])
    for task in os.listdir("/proc/self/task"):
        if int(task) != main:
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    bucket, = transform.sharded.buckets
    slot = bucket.arena.slot(0, slot_bytes(bucket.spec, bucket.spec.param_dtype))
    for step in range(3):
        if how == "failed" and rank == 1 and step == 1:
            sys.exit(3)
        grads = [torch.ones(param.shape) for param in bucket.spec.params]
        reduction = ops.reduce_scatter(bucket, slot, *grads)
        ops.wait_grads(bucket, reduction)
        ops.wait_params(bucket, ops.all_gather(bucket, slot, *bucket.params))
    for _ in range(5 if how == "own" else 0):
        dist.all_gather([torch.empty(4096) for _ in range(2)], torch.ones(4096))
    if how == "twin":
        dist.destroy_process_group()

torch.set_num_threads(1)
folder, *hows = sys.argv[1:]
for name in hows:
    store = f"{folder}/store-{len(os.listdir(folder))}"
    open(store, "w").close()
    print(name, end=": ", flush=True)
    rank = rank_of()
    if rank is not None:
        run(rank, store, name)
        break
"""

EXPECTED = {"left": "0 0", "own": "0 0", "twin": "0 0", "failed": "1 3"}
"""Ways in which a process ends, with the expected exit codes of both ranks.

"left" and "twin": without and with ``destroy_process_group``, the latter of a second group for reductions, too.
"own": after collectives of the script's own, whose tensors nobody else keeps; often aborts without the exit hook.
"failed": rank 1 exits with code 3 before a collective.
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's scheduling classes")
def test_a_process_that_used_gloo_exits_with_its_own_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    stores = tmp_path / "stores"
    stores.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), str(stores), *EXPECTED],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(thunder_fsdp_sched.__file__).parents[1])},
    )
    expected = [f"{way}: {codes}" for way, codes in EXPECTED.items()]
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
