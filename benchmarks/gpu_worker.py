"""A worker of ``python benchmarks/gpu.py first``, which runs cases one after the other and records each result.

``gpu_first.py`` starts one worker per rank, with a ``Job`` in a file. The worker writes its results to another file, one
line of JSON at a time, so nothing is lost if the process dies: ``{"ready": true}``, then ``{"case": ..., "begun": true}``
and a record for each case. After a failure the process ends, because CUDA may have lost its context, and another process
continues with the remaining cases. A refusal (``ValueError``) is not a failure.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from gpu_cases import Job, describe_error, has_failed
from gpu_steps import WORK, Setup

__all__ = ["run_case"]


def main() -> None:
    import torch

    job, rank = Job.load(Path(sys.argv[1])), int(sys.argv[2])
    # Ends a hang with the stacks of all threads, even if another thread holds the interpreter.
    faulthandler.dump_traceback_later(job.limit, exit=True)
    with job.results_of(rank).open("w") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        setup = _start(job, rank)
        note(ready=True)
        for name in job.cases:
            faulthandler.dump_traceback_later(job.limit, exit=True)
            note(case=name, begun=True)
            record = run_case(partial(WORK[job.work], setup), name)
            note(case=name, **record)
            if has_failed(record):
                sys.stderr.flush()
                os._exit(3)
            gc.collect()
            if job.device == "cuda" and setup is not None:
                torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    _end(job)


def run_case(work: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Run one case and return its record: ``status`` is ``"ok"``, ``"refused"`` or ``"failed"``, the latter two with
    ``error``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            record = {"status": "ok", **work(name)}
        except ValueError as error:
            record = {"status": "refused", "error": describe_error(error)}
        except Exception as error:
            traceback.print_exc()
            record = {"status": "failed", "error": describe_error(error)}
    texts = {str(warning.message).split("\n")[0] for warning in caught}
    texts.add(record.pop("loose", ""))
    record["nondeterministic"] = sorted(t for t in texts if "deterministic" in t)
    return record


def _start(job: Job, rank: int) -> Setup | None:
    """Set up the device and the process group; return ``None`` if the job only describes the machine."""
    if job.work == "machine":
        return None
    import thunder_fsdp_sched  # before thunder  # noqa: F401

    import torch.distributed as dist

    setup = Setup(job, rank)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.limit / 2),  # so that ranks that wait for a dead rank report it before the limit
    )
    return setup


def _end(job: Job) -> None:
    import torch.distributed as dist

    if job.work != "machine":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
