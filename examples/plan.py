"""Plan a training step on a cluster that you do not have: python examples/plan.py

One process traces the model on the meta device as rank 0 of 64 would, and simulates a step. Nothing is sent or computed.
"""

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.planning import Decoder, Shape, dry_run_step

import torch


def make():
    """Return a module and the inputs of a call."""
    with torch.device("meta"):
        shape = Shape(blocks=2, width=1024, heads=8, kv_heads=8, hidden=4096, vocabulary=256)
        model = Decoder(shape, 512).to(torch.bfloat16)
        return model, (torch.zeros((8, 512), dtype=torch.int64),)


def main():
    steps = {}
    for strategy in ("zero2", "zero3"):
        steps[strategy] = step = dry_run_step(make, world_size=64, on="h100-sxm", sharding_strategy=strategy)
        time = step.after
        print(
            f"{strategy}: step {1e3 * time.step_seconds:.2f} ms, unsorted {1e3 * step.before.step_seconds:.2f} ms, "
            f"{1e3 * time.exposed_seconds:.2f} ms of communication exposed, "
            f"at most {time.peak_unsharded_bytes / 1e6:.1f} MB unsharded"
        )
    return steps


if __name__ == "__main__":
    main()
