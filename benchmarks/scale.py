"""Compute what grows with the number of ranks, for a model on the presets of clusters.

    python benchmarks/scale.py                                       # Llama-3-8B on H100 and A100, 8 to 1,024 ranks
    python benchmarks/scale.py --hop 120 --picture scale.png

Nothing here runs on that many ranks. *Measured* in this process: tracing, ``thunder.jit`` as one of W fake ranks, and a
request to a store. *Measured by others*: a hop of a round of agreement, by ``rounds.py``. *Assumed*: the latency of the
control network, how late hosts are, and the bandwidth to storage. The rest is *computed* from the contracts that
``tests/test_cost_in_ranks.py`` and ``tests/agreement/test_rounds.py`` check, and from the presets:

* a step: the simulated step, two rounds of ceil(log2 W) hops of which nothing is hidden, and the latest of W hosts;
* ``thunder.jit``: its own time, four rounds, and 18 requests of each rank to one store, one after the other. gloo connects
  all ranks of a new group, as for any group of gloo: at most W - 1 further requests of each rank;
* the first step: tracing and compiling, and four rounds;
* the full state dict: a gather of each segment of a bucket, and one round;
* a save of parameters and two states of an optimizer: a rank's share to storage, and a message of each rank to the first.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched.extras.planning.clusters import cluster
from thunder_fsdp_sched.extras.planning.cost import ring_seconds
from thunder_fsdp_sched.extras.planning.dry_run import DryRun, dry_run_step, fake_rank, find_model, jit, replan

import torch
import torch.distributed as dist
from harness import table

SIZES = [8, 32, 128, 512, 1024]
ROUNDS_OF_STEP, ROUNDS_OF_JIT, ROUNDS_OF_FIRST_STEP = 2, 4, 4
REQUESTS_OF_JIT = 18
LIMIT = 0.02  # of a step
DRAWS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="Llama-3-8B")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--on", nargs="+", default=["h100-sxm", "a100-sxm"], help="presets of clusters")
    parser.add_argument("--hop", type=float, default=120.0, help="microseconds of a hop, measured by rounds.py")
    parser.add_argument(
        "--latency", type=float, default=30.0, help="assumed microseconds of the control network, one way"
    )
    parser.add_argument("--late", type=float, default=0.2, help="assumed mean milliseconds by which a host is late")
    parser.add_argument("--storage", type=float, default=2.0, help="assumed GB/s of a node to storage")
    parser.add_argument("--picture", help="where to draw the shares of a step")
    given = parser.parse_args()
    make = find_model(given.model, batch=1, length=given.length, dtype=torch.bfloat16)
    started = time.process_time()
    step = dry_run_step(make, world_size=SIZES[0], on=given.on[0], prefetch=1)
    compiling, request = time.process_time() - started, seconds_of_a_request()
    print(f"measured: compiling {compiling:.1f} s of processor time, a request to the store {request * 1e6:.0f} us\n")
    jitting = {size: seconds_of_jit(step, size) for size in SIZES}
    shares = {}
    for name in given.on:
        rows = {}
        for size in SIZES:
            rows[size] = row(replan(step, world_size=size, on=name), given, compiling, jitting[size], request)
        shares[name] = {size: of["share"] for size, of in rows.items()}
        print(f"{given.model}, {given.length} tokens a rank, on {name}\n")
        print(table({str(size): of for size, of in rows.items()}, COLUMNS), "\n")
    worst = max(of[SIZES[-1]] for of in shares.values())
    print(f"agreement takes at most {worst:.2%} of a step on {SIZES[-1]} ranks; the limit is {LIMIT:.0%}")
    if given.picture:
        draw(shares, given.picture)


COLUMNS = {
    "step ms": ("step", ".1f"),
    "agreement ms": ("agreement", ".2f"),
    "of a step": ("share", ".2%"),
    "as a ring": ("ring", ".1%"),
    "latest host ms": ("late", ".2f"),
    "jit s": ("jit", ".2f"),
    "gloo, at most s": ("connects", ".2f"),
    "first step s": ("first", ".1f"),
    "full state dict s": ("full", ".2f"),
    "save s": ("save", ".2f"),
}


def row(step: DryRun, given: argparse.Namespace, compiling: float, jitting: float, request: float) -> dict[str, float]:
    """Return the figures of one number of ranks, in the units of the columns."""
    size, spec = step.world_size, cluster(step.cluster)
    hop = (given.hop + given.latency) * 1e-6
    hops = math.ceil(math.log2(size))
    draw = random.Random(size)
    late = statistics.median(max(draw.expovariate(1 / given.late) for _ in range(size)) for _ in range(DRAWS))
    plan = step.transform.plan
    nbytes = sum(bucket.unsharded_bytes for bucket in plan)
    gathers = sum(ring_seconds(spec, bucket.unsharded_bytes, tuple(range(size))) for bucket in plan)
    return {
        "step": step.seconds * 1e3,
        "agreement": ROUNDS_OF_STEP * hops * hop * 1e3,
        "share": ROUNDS_OF_STEP * hops * hop / step.seconds,
        "ring": ROUNDS_OF_STEP * (size - 1) * hop / step.seconds,
        "late": late,
        "jit": jitting + ROUNDS_OF_JIT * hops * hop + REQUESTS_OF_JIT * size * request,
        "connects": size * (size - 1) * request,
        "first": compiling + ROUNDS_OF_FIRST_STEP * hops * hop + step.seconds,
        "full": gathers + hops * hop,
        "save": 3 * nbytes / size * spec.devices_per_node / (given.storage * 1e9) + (size - 1) * given.hop * 1e-6,
    }


def seconds_of_jit(step: DryRun, size: int) -> float:
    """Return the processor time of ``thunder.jit`` as the first of ``size`` ranks."""
    gc.collect()  # not while the time is taken: the step's traces are large
    started = time.process_time()
    with fake_rank(0, size):
        jit(step.make()[0], thunder_fsdp_sched.fsdp())
    return time.process_time() - started


def seconds_of_a_request(times: int = 2000) -> float:
    """Return the time of a request to a store of torch on this machine."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("key", "value")
    started = time.perf_counter()
    for _ in range(times):
        store.get("key")
    return (time.perf_counter() - started) / times


def draw(shares: dict[str, dict[int, float]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, of in shares.items():
        axes.plot(list(of), [100 * share for share in of.values()], marker="o", label=name)
    axes.axhline(100 * LIMIT, color="grey", linestyle="--", label="limit")
    axes.set(xscale="log", xlabel="ranks", ylabel="agreement, % of a step", xticks=SIZES, xticklabels=map(str, SIZES))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
