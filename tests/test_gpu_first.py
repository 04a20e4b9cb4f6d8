"""``python benchmarks/gpu.py first``, as far as it can be tested without a GPU: its plan, its processes, its page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.demo.model import GPT
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.testing import compile_on_fake_ranks

import gpu_first
import gpu_worker
import pytest
import torch
from forked import run_python
from gpu_cases import CASES, REFERENCE, Job, describe_error, has_failed
from gpu_first import Step, merge, parse, plan, run_step
from gpu_page import FINE, page, verdict
from gpu_steps import machine, measured, simulated
from gpu_trace import Activity

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

StartWorker = Callable[[Path, int, Mapping[str, str], Path], "subprocess.Popen[bytes]"]


def trained(*digests: str, difference: float = 1e-7, **more: Any) -> dict[str, Any]:
    figures = {"digests": list(digests), "losses": [5.5], "seconds": 0.01, "finite": True, "started_alike": True}
    return {"status": "ok", **figures, "difference": difference, "nondeterministic": [], **more}


#
# The plan
#


def test_the_steps_for_one_gpu_include_blocking_sanitized_shared_and_profiled_runs() -> None:
    steps = {step.name: step for step in plan(parse([]), 1)}
    assert list(steps) == ["alone", "blocking", "sanitizer", "shared", "profile"]
    assert all(step.world_size == 1 and step.backend == "nccl" for n, step in steps.items() if n != "shared")
    assert steps["alone"].cases == (REFERENCE, *CASES)
    assert dict(steps["blocking"].environment) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert steps["blocking"].like == "alone"
    assert dict(steps["sanitizer"].environment) == {"TORCH_CUDA_SANITIZER": "1"}
    assert [name for name, step in steps.items() if not step.fuse] == ["sanitizer"]  # torch.compile refuses it
    assert (steps["shared"].world_size, steps["shared"].backend, steps["shared"].one_device) == (2, "gloo", True)
    assert not [case for case in steps["shared"].cases if "coalesced" in case]
    assert {CASES[c].transport for c in steps["alone"].cases if c in CASES} == set(_transports())


def _transports() -> list[str]:
    from thunder_fsdp_sched.transports import TRANSPORTS

    return list(TRANSPORTS)


def test_several_gpus_get_one_rank_each() -> None:
    steps = {step.name: step for step in plan(parse([]), 4)}
    assert list(steps)[-3:] == ["ranks", "ranks, blocking", "profile"]
    assert all(steps[n].world_size == 4 and not steps[n].one_device for n in ("ranks", "ranks, blocking", "profile"))
    assert steps["ranks, blocking"].like == "ranks"


def test_cases_and_steps_are_chosen_by_pattern_and_no_match_is_an_error() -> None:
    arguments = parse(["--cases", "zero3 (flat|staged)$", "--only", "alone|profile"])
    alone, profile = plan(arguments, 1)
    assert alone.cases == (REFERENCE, "zero3 flat", "zero3 staged")
    assert profile.cases == ("zero3 flat", "zero3 staged")
    with pytest.raises(ValueError, match="--cases 'ring' matches none of zero3 flat, "):
        plan(parse(["--cases", "ring"]), 1)
    with pytest.raises(ValueError, match="--only 'twice' matches none of alone, blocking"):
        plan(parse(["--only", "twice"]), 1)


#
# Processes
#

WORKER = """
import json, os, sys, time
from pathlib import Path
job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
with open(f"{job['results']}-{rank}.jsonl", "w") as file:
    def note(**what):
        file.write(json.dumps(what) + "\\n")
        file.flush()
    note(ready=True)
    for case in job["cases"]:
        note(case=case, begun=True)
        if case == "dies" and rank == job["world_size"] - 1:
            print("Fatal Python error: Segmentation fault", flush=True)
            os.kill(os.getpid(), 11)
        if case == "dies":
            time.sleep(600)
        if case == "fails":
            note(case=case, status="failed", error="CUDA error")
            os._exit(3)
        note(case=case, status="ok", digests=[case], environment=os.environ.get("MARK"))
"""


@pytest.fixture
def worker(tmp_path: Path) -> StartWorker:
    """A function that starts a stand-in for a worker, which fails in the cases ``fails`` and ``dies``."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(job: Path, rank: int, environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            command = [sys.executable, str(script), str(job), str(rank)]
            return subprocess.Popen(command, env=dict(environment), stdout=file, stderr=subprocess.STDOUT)

    return start


def test_cases_after_a_failing_or_dying_one_still_run(worker: StartWorker, tmp_path: Path) -> None:
    step = Step("mixed", "train", ("first", "fails", "second", "dies", "third"), environment=(("MARK", "here"),))
    records = run_step(step, parse([]), tmp_path, worker)
    assert list(records) == list(step.cases)
    assert [r["status"] for r in records.values()] == ["ok", "failed", "ok", "failed", "ok"]
    assert records["third"]["environment"] == "here"
    assert records["fails"]["error"] == "CUDA error"
    assert records["dies"]["error"] == "the process ended with exit code -11\nFatal Python error: Segmentation fault"


def test_ranks_that_wait_for_a_dead_rank_are_stopped_and_its_output_is_kept(
    worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_first, "_GRACE", 0.5)
    records = run_step(Step("two", "train", ("first", "dies", "third"), world_size=2), parse([]), tmp_path, worker)
    assert [r["status"] for r in records.values()] == ["ok", "failed", "ok"]
    assert records["first"]["digests"] == ["firstfirst"]
    assert records["dies"]["error"].startswith("rank 1: the process ended with exit code -11\nFatal Python error")


def test_processes_that_do_not_start_fail_all_cases_at_once(tmp_path: Path) -> None:
    starts = []

    def start(job: Path, rank: int, environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        starts.append(job)
        output.write_text("ImportError: libcudart.so.12\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    records = run_step(Step("broken", "train", ("a", "b")), parse([]), tmp_path, start)
    assert len(starts) == 1
    assert {r["error"] for r in records.values()} == {
        "the process ended with exit code 1 before the first case\nImportError: libcudart.so.12"
    }


def test_a_failure_after_all_cases_is_reported() -> None:
    lines = [{"ready": True}, {"case": "a", "begun": True}, {"case": "a", "status": "ok"}]
    records = merge(["a"], [lines], [-6], ["terminate called"])
    assert records["a"]["end"] == {"error": "rank 0 ended with exit code -6 after all cases\nterminate called"}
    assert has_failed(records["a"])
    assert not has_failed(merge(["a"], [lines], [0], [""])["a"])


def test_a_case_fails_if_it_fails_on_any_rank() -> None:
    def lines(status: str) -> list[dict[str, Any]]:
        error = {} if status == "ok" else {"error": "no"}
        return [{"case": "a", "begun": True}, {"case": "a", "status": status, "digests": ["x"], **error}]

    assert merge(["a"], [lines("ok"), lines("failed")], [0, 3], ["", ""])["a"]["error"] == "rank 1: no"
    assert merge(["a"], [lines("ok"), lines("refused")], [0, 0], ["", ""])["a"]["status"] == "refused"
    assert merge(["a"], [lines("ok"), lines("ok")], [0, 0], ["", ""])["a"]["digests"] == ["xx"]


def test_the_stand_in_run_on_cpus_trains_simulates_and_reports_that_there_is_no_gpu(tmp_path: Path) -> None:
    """Everything that does not need a GPU, in real processes: workers, training, digests, the page."""
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


#
# The worker
#


def test_a_worker_records_the_result_or_the_error_of_a_case() -> None:
    def work(name: str) -> dict[str, Any]:
        if name == "refused":
            raise ValueError("needs two GPUs")
        if name == "failed":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nline 2")
        return {"seconds": 1.0}

    assert gpu_worker.run_case(work, "ok") == {"status": "ok", "seconds": 1.0, "nondeterministic": []}
    refused = gpu_worker.run_case(work, "refused")
    assert refused["status"] == "refused"
    assert refused["error"] == "ValueError: needs two GPUs"
    failed = gpu_worker.run_case(work, "failed")
    assert failed["status"] == "failed"
    assert failed["error"].splitlines() == [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "line 2",
    ]


def test_a_job_survives_saving_and_loading(tmp_path: Path) -> None:
    job = Job("train", ("a", "b"), "cuda", "nccl", 2, False, 1.0, 1, 64, 8, 1, 2, 3, True, "store", "results", "folder")
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_an_error_is_described_by_its_type_first_lines_and_location() -> None:
    with pytest.raises(ValueError, match="transport") as caught:
        fsdp(transport="ring")
    text = describe_error(caught.value)
    assert text.startswith("ValueError: transport: expected 'auto', one of")
    assert "thunder_fsdp_sched/options.py:" in text.splitlines()[-1]

    class Sanitized(Exception):
        errors = ("a", "b")

        def __init__(self) -> None:
            self.errors = ["CSAN detected a possible data race on tensor with data pointer 1\nAccess by kernel", "b"]

    assert describe_error(Sanitized()).startswith("Sanitized: CSAN detected a possible data race")


def test_the_machine_is_described_without_a_gpu() -> None:
    answers = machine(None, "machine")["machine"]
    assert answers["torch"].startswith(torch.__version__)
    assert "torch, python" in answers["executors"]
    assert {
        "thunder_fsdp_sched",
        "Triton",
        "lightning-thunder",
        "driver",
        "NCCL",
        "GPUs",
        "environment",
    } <= answers.keys()


#
# The page
#


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (None, "-"),
        ({"status": "refused", "error": "needs two GPUs"}, "refused"),
        ({"status": "failed", "error": "CUDA error"}, "FAILED"),
        (trained("a", "a"), "ok"),
        (trained("a", "b"), "NOT REPEATABLE"),
        (trained("b", "b"), "OTHER BITS"),
        (trained("a", difference=0.01), "WRONG"),
        (trained("a", finite=False), "NOT FINITE"),
        (trained("a", started_alike=False), "OTHER START"),
        (trained("a", end={"error": "exit code -6"}), "FAILED"),
    ],
)
def test_a_verdict_names_what_is_wrong(record: dict[str, Any] | None, word: str) -> None:
    step = Step("blocking", "train", ("zero3 flat",), like="alone")
    steady = {REFERENCE: trained("r", "r")}
    results = {"alone": {"zero3 flat": trained("a", "a"), **steady}, "blocking": steady}
    assert verdict(step, "zero3 flat", record, results) == word
    assert (word in FINE) == (word in ("ok", "refused")) or record is None


def test_bits_may_vary_if_those_of_the_unsharded_model_vary() -> None:
    step = Step("blocking", "train", ("zero3 flat",), like="alone")
    results = {"alone": {"zero3 flat": trained("a"), REFERENCE: trained("r")}, "blocking": {REFERENCE: trained("s")}}
    assert verdict(step, "zero3 flat", trained("b"), results) == "varies"
    assert verdict(step, "zero3 flat", trained("a", "b"), results) == "varies"
    assert verdict(step, "zero3 flat", trained("b", difference=0.5), results) == "WRONG"


def test_bfloat16_has_a_larger_tolerance() -> None:
    step = Step("alone", "train", ("zero3 flat bfloat16",))
    assert verdict(step, "zero3 flat bfloat16", trained("a", difference=0.01), {}) == "ok"
    assert verdict(step, "zero3 flat bfloat16", trained("a", difference=0.5), {}) == "WRONG"


def profiled(order: list[str], predicted: list[str]) -> dict[str, Any]:
    figures = {"seconds": 0.01, "compute": 0.008, "communication": 0.004, "exposed": 0.001, "idle": 0.0005}
    counts = {"streams": 3, "kernels": 70, "communication_kernels": 9, "copies": 2}
    return {
        "status": "ok",
        "seconds": 0.012,
        "measured": {"order": order, **figures, **counts},
        "by profile": {"order": predicted, **figures},
        "by preset": {"error": "ValueError: no preset is known for NVIDIA L4", "refused": True},
        "nondeterministic": [],
    }


def test_the_page_has_versions_verdicts_and_figures_and_lists_each_error_once() -> None:
    cases = ("zero3 flat", "zero3 staged", "zero3 symmetric_memory")
    steps = [Step("alone", "train", (REFERENCE, *cases)), Step("profile", "profile", cases)]
    error = (
        "RuntimeError: CUDA error: misaligned address\n  at thunder_fsdp_sched/transports/staged.py:41, in interleave"
    )
    results = {
        "alone": {
            REFERENCE: trained("a", "a", peak=2**20 * 300),
            "zero3 flat": trained("a", "a", peak=2**20 * 321, nondeterministic=["foo is not deterministic"]),
            "zero3 staged": {"status": "failed", "error": error},
            "zero3 symmetric_memory": {"status": "refused", "error": "ValueError: cannot share memory"},
        },
        "profile": {
            "zero3 flat": profiled(["g(a)", "g(b)"], ["g(b)", "g(a)"]),
            "zero3 staged": {"status": "failed", "error": error},
            "zero3 symmetric_memory": {"status": "refused", "error": "ValueError: cannot share memory"},
        },
    }
    machine_record = {
        "status": "ok",
        "machine": {"torch": "2.13.0", "GPUs": ["0: NVIDIA L4", "1: NVIDIA L4"], "environment": {}},
    }
    text, failures = page(machine_record, steps, results, "a GPT", 61.2)
    lines = text.splitlines()
    assert failures == 2
    assert lines[:6] == [
        "thunder_fsdp_sched, first run on a GPU",
        "torch: 2.13.0",
        "GPUs: 0: NVIDIA L4",
        "GPUs: 1: NVIDIA L4",
        "environment: nothing",
        "model: a GPT",
    ]
    assert "2 of 7 failed, 2 were refused with a reason" in lines
    assert next(line.split() for line in lines if line.startswith("zero3 flat")) == [
        "zero3",
        "flat",
        "ok",
        "other",
        "order",
    ]
    assert text.count("misaligned address") == 1
    assert "FAILED (alone: zero3 staged; profile: zero3 staged)" in lines
    assert "refused (alone: zero3 symmetric_memory; profile: zero3 symmetric_memory)" in lines
    assert "  zero3 flat, by profile: number 1: predicted g(b), ran g(a)" in lines
    assert any("10.00 / 10.00 / -" in line for line in lines)
    assert any(line.split()[2:5] == ["10.00", "321", "1.0e-07"] for line in lines if line.startswith("zero3 flat"))
    assert "  foo is not deterministic" in lines
    assert max(map(len, lines)) <= 160


def test_a_machine_that_cannot_be_described_is_a_failure_with_its_error() -> None:
    steps = [Step("alone", "train", ("zero3 flat",))]
    results = {"alone": {"zero3 flat": trained("a")}}
    text, failures = page({"status": "failed", "error": "the process died"}, steps, results, "a GPT", 1.0)
    assert failures == 1
    assert text.splitlines()[1:3] == ["machine: unknown", "  the process died"]


#
# Predicted and measured
#


def test_the_simulated_order_of_collectives_can_be_compared_with_a_gpus() -> None:
    def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
        with torch.device("meta"):
            return GPT(blocks=2, width=64, heads=1, length=8), (tokens, tokens)

    [compiled] = compile_on_fake_ranks(make, world_size=4, ranks=[0])
    predicted = simulated(compiled, AnalyticCost("h100-sxm"))
    kinds = [name.split("(")[0] for name in predicted["order"]]
    assert kinds[0] == "fsdp_all_gather"
    assert kinds[-1] == "fsdp_reduce_scatter"
    assert predicted["seconds"] >= predicted["compute"] > 0
    issued = 1.0
    activities = []
    for name in predicted["order"]:  # a GPU that does what the simulator predicts
        activities.append(Activity("ncclKernel", "kernel", 20, issued, issued + 0.5, "", name, issued))
        activities.append(Activity("gemm", "kernel", 7, issued, issued + 1))
        issued += 1
    figures = measured(activities)
    assert figures["order"] == predicted["order"]
    assert figures["communication"] == pytest.approx(0.5 * len(kinds))
    assert figures["exposed"] == 0
    assert figures["streams"] == 2
    with pytest.raises(RuntimeError, match="nothing run on the GPU"):
        measured([])
