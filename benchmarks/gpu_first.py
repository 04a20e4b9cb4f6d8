"""Try the package on a GPU for the first time (``python benchmarks/gpu.py first``), and print one page for an issue.

    python benchmarks/gpu.py first
    python benchmarks/gpu.py first --cases 'flat|staged' --save first       # fewer configurations; keep all output
    python benchmarks/gpu.py first --stand-in --cases 'zero3 flat$'          # test this program on a CPU, with gloo

This has not run on a GPU yet. Each step below trains or profiles every configuration of ``gpu_cases.CASES`` in separate
processes. If a case fails, crashes or hangs, its process ends, and another process continues with the remaining cases. So
one failure does not hide another. The page goes to standard output, and progress to standard error. The exit code is 0 if
nothing failed (or there is no GPU), otherwise 1.

* One GPU, NCCL with world size 1. Collectives are only copies, but streams, events and memory are those of real training.
* The same with ``CUDA_LAUNCH_BLOCKING=1``, where nothing overlaps: the results must have the same bits.
* The same with ``TORCH_CUDA_SANITIZER=1``, which tracks kernels by the addresses of their arguments. It does not know which
  stream NCCL uses, and does not track pinned memory.
* Two ranks on one GPU, with gloo: collectives receive data from another rank, and symmetric memory can be tried.
* With several GPUs: one rank per GPU (``torch.cuda.set_device``) with NCCL, and the same with ``CUDA_LAUNCH_BLOCKING=1``.
* A step under the profiler, compared with the simulator: once with the chip's preset, once with a profile measured on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cases import CASES, REFERENCE, Job, has_failed
from gpu_page import page

__all__ = ["Step", "main", "merge", "parse", "plan", "run_step"]

Records = dict[str, dict[str, Any]]
"""The record of each case, keyed by its name."""


@dataclass(frozen=True)
class Step:
    """All cases in one setup.

    Attributes:
        name: a short name for the page.
        work: the name of a function in ``gpu_steps.WORK``.
        like: the name of the step that must give the same bits, ``""`` for none.
    """

    name: str
    work: str
    cases: tuple[str, ...]
    world_size: int = 1
    backend: str = "nccl"
    one_device: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    like: str = ""
    steps: int = 4
    repeats: int = 4
    fuse: bool = True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.py first", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", metavar="REGEX", default="", help="only configurations whose names match")
    parser.add_argument("--only", metavar="REGEX", default="", help="only steps whose names match")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a case counts as hanging")
    parser.add_argument("--save", type=Path, help="folder for the page, all records, and what the processes printed")
    parser.add_argument("--stand-in", action="store_true", help="gloo on the CPU: test this program, not a GPU")
    return parser.parse_args(argv)


def plan(arguments: argparse.Namespace, device_count: int) -> list[Step]:
    """Return the steps, in the order in which they run.

    Raises:
        ValueError: ``--cases`` or ``--only`` matches nothing.
    """
    cases = tuple(name for name in CASES if re.search(arguments.cases, name))
    if not cases:
        raise ValueError(f"--cases {arguments.cases!r} matches none of {', '.join(CASES)}")
    trained = (REFERENCE, *cases)
    # gloo's coalesced all-gather does not take CUDA tensors.
    through_gloo = tuple(n for n in trained if "coalesced" not in n) if not arguments.stand_in else trained
    blocking = (("CUDA_LAUNCH_BLOCKING", "1"),)
    sanitizer = (("TORCH_CUDA_SANITIZER", "1"),)
    overlapping = (("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"),)
    steps = [
        Step("alone", "train", trained),
        Step("blocking", "train", trained, environment=blocking, like="alone", repeats=1),
        Step("sanitizer", "train", trained, environment=sanitizer, steps=2, repeats=1, fuse=False),
        Step("shared", "train", through_gloo, 2, "gloo", one_device=True, environment=overlapping),
    ]
    if device_count > 1:
        steps += [
            Step("ranks", "train", trained, device_count),
            Step("ranks, blocking", "train", trained, device_count, environment=blocking, like="ranks", repeats=1),
        ]
    steps.append(Step("profile", "profile", cases, device_count))
    if arguments.stand_in:  # torch's sanitizer needs CUDA for every operator
        steps = [dataclasses.replace(s, backend="gloo", one_device=False) for s in steps if s.name != "sanitizer"]
    chosen = [step for step in steps if re.search(arguments.only, step.name)]
    if not chosen:
        raise ValueError(f"--only {arguments.only!r} matches none of {', '.join(step.name for step in steps)}")
    return chosen


def main(argv: Sequence[str], device_count: int) -> int:
    """Run everything, print the page, and return the exit code.

    Args:
        device_count: the number of GPUs.
    """
    arguments = parse(argv)
    try:
        steps = plan(arguments, 1 if arguments.stand_in else device_count)
    except (ValueError, re.error) as error:
        print(f"gpu.py first: {error}", file=sys.stderr)
        return 2
    folder = arguments.save or Path(tempfile.mkdtemp(prefix="gpu-first-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[str, Records] = {}
    ask = Step("machine", "machine", ("machine",))
    asked = run_step(ask, arguments, folder)["machine"]
    for step in steps:
        found[step.name] = run_step(step, arguments, folder)
    (folder / "records.json").write_text(json.dumps({"machine": asked, **found}, indent=1))
    setup = f"GPT, {arguments.blocks} blocks of width {arguments.width}, {arguments.batch} x {arguments.length} bytes a rank"
    if arguments.stand_in:
        setup += "; STAND-IN: all of it ran on the CPU, through gloo"
    text, failures = page(asked, steps, found, setup, time.monotonic() - started)
    (folder / "page.txt").write_text(text)
    print(text, end="")
    print(f"everything that was printed: {folder}", file=sys.stderr)
    return 1 if failures else 0


def run_step(
    step: Step,
    arguments: argparse.Namespace,
    folder: Path,
    start: Callable[[Path, int, Mapping[str, str], Path], subprocess.Popen[bytes]] | None = None,
) -> Records:
    """Run all cases of a step. If a process fails, dies or hangs, another one runs the remaining cases.

    Args:
        folder: the folder for the files of the processes.
        start: starts a worker; its arguments are the job file, the rank, the environment, and the file for its output.
    """
    records: Records = {}
    environment = {**os.environ, **dict(step.environment)}
    if step.work == "train":
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise matrix products differ between runs
    slug = re.sub(r"\W+", "_", step.name)
    attempt = 0
    while left := tuple(case for case in step.cases if case not in records):
        attempt += 1
        job = Job(
            work=step.work,
            cases=left,
            device="cpu" if arguments.stand_in else "cuda",
            backend=step.backend,
            world_size=step.world_size,
            one_device=step.one_device,
            limit=arguments.limit,
            blocks=arguments.blocks,
            width=arguments.width,
            length=arguments.length,
            batch=arguments.batch,
            steps=step.steps,
            repeats=step.repeats,
            fuse=step.fuse,
            store=str(folder / f"{slug}-{attempt}-store"),
            results=str(folder / f"{slug}-{attempt}"),
            references=str(folder),
        )
        path = folder / f"{slug}-{attempt}-job.json"
        job.save(path)
        for rank in range(job.world_size):  # left by an earlier run in the same folder
            job.results_of(rank).unlink(missing_ok=True)
        Path(job.store).unlink(missing_ok=True)
        done = _run_job(job, path, environment, start or _start_worker)
        for case, record in done.items():
            status = "failed" if has_failed(record) else record["status"]
            print(f"{step.name}: {case}: {status}", file=sys.stderr, flush=True)
        records |= done
    return records


def _start_worker(job: Path, rank: int, environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("gpu_worker.py")), str(job), str(rank)]
    with output.open("wb") as file:
        return subprocess.Popen(command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT)


_GRACE = 10.0  # seconds for the other ranks to report what happened to them after one has failed


def _run_job(
    job: Job,
    path: Path,
    environment: Mapping[str, str],
    start: Callable[[Path, int, Mapping[str, str], Path], subprocess.Popen[bytes]],
) -> Records:
    """Run the processes of one job until they end; return the records of at least one of its cases."""
    outputs = [Path(f"{job.results}-{rank}.txt") for rank in range(job.world_size)]
    processes = [start(path, rank, environment, outputs[rank]) for rank in range(job.world_size)]
    ended = last_sign = time.monotonic()
    seen = 0
    try:
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            size = sum(
                job.results_of(rank).stat().st_size for rank in range(job.world_size) if job.results_of(rank).exists()
            )
            if size != seen:
                seen, last_sign = size, now
            if not any(process.poll() for process in processes):  # none has failed
                ended = now
            # Workers enforce the limit of a case themselves; this is for a worker that cannot.
            if now - ended > _GRACE or now - last_sign > job.limit + 30:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        codes = [process.wait() for process in processes]
    ranks = [_read(job.results_of(rank)) for rank in range(job.world_size)]
    return merge(job.cases, ranks, codes, [_tail(output) for output in outputs])


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines that a worker wrote; the last one may be incomplete."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _tail(output: Path, lines: int = 12) -> str:
    """Return the end of the output of a process, or its error and the lines after it if the output contains one."""
    text = [line for line in output.read_text(errors="replace").splitlines() if line.strip()] if output.exists() else []
    starts = [
        i for i, line in enumerate(text) if line.startswith(("Fatal Python error", "Timeout (", "Traceback (most"))
    ]
    if starts and text[starts[0]].startswith(("Fatal Python error", "Timeout (")):
        return "\n".join(text[starts[0] : starts[0] + lines])
    return "\n".join(text[-lines:])


def merge(
    cases: Sequence[str], ranks: Sequence[Sequence[Mapping[str, Any]]], codes: Sequence[int], outputs: Sequence[str]
) -> Records:
    """Merge the lines that the ranks of a job wrote into records of its cases; return at least one record.

    The case during which the ranks ended has failed. Figures are those of rank 0; digests are those of all ranks, joined.
    If a rank did not finish a case, the case has failed with that rank's report or the end of its output.

    Args:
        cases: the cases of the job.
        ranks: the lines that each rank wrote.
        codes: the exit code of each rank.
        outputs: the end of each rank's output.
    """
    records: Records = {}
    many = len(ranks) > 1
    for case in cases:
        found = [next((dict(r) for r in lines if r.get("case") == case and "status" in r), None) for lines in ranks]
        begun = any(r.get("case") == case for lines in ranks for r in lines)
        if not begun and records:
            break  # the next process runs it
        if all(found):
            done = [record for record in found if record is not None]
            worst = max(done, key=lambda r: ("ok", "refused", "failed").index(r["status"]))
            record = dict(worst if worst["status"] != "ok" else done[0])
            if "digests" in record:
                record["digests"] = ["".join(parts) for parts in zip(*(r["digests"] for r in done), strict=True)]
            rank = done.index(worst)
        else:
            failed = [i for i, r in enumerate(found) if r is not None and has_failed(r)]
            died = [i for i, code in enumerate(codes) if code not in (0, -9)]
            rank = (failed or died or [found.index(None)])[0]
            record = found[rank] if failed else None
            if record is None:
                how = "was killed after the time limit" if codes[rank] == -9 else f"ended with exit code {codes[rank]}"
                at = "" if begun else " before the first case"
                record = {"status": "failed", "error": f"the process {how}{at}\n{outputs[rank]}".rstrip()}
        if many and "error" in record:
            record["error"] = f"rank {rank}: {record['error']}"
        records[case] = record
        if not begun:  # it did not even start, and neither would another process
            records |= {other: record for other in cases if other not in records}
            break
        if has_failed(record):
            return records
    if len(records) == len(cases) and any(codes):
        rank = next(i for i, code in enumerate(codes) if code)
        error = f"rank {rank} ended with exit code {codes[rank]} after all cases\n{outputs[rank]}".rstrip()
        records[cases[-1]]["end"] = {"error": error}
    return records
