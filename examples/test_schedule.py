"""Pin a schedule in pytest, without ranks and without a GPU.

pytest --update-schedules examples/test_schedule.py

writes examples/schedules/*.json; commit these files. Later runs without the option fail if the schedule changes, and show
what changed.
"""

from thunder_fsdp_sched import testing

import torch
from torch.nn import GELU, Embedding, Linear, Sequential


def make():
    """Return a module and the inputs of a call, on the meta device because nothing is computed."""
    with torch.device("meta"):
        blocks = [Sequential(Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(3)]
        model = Sequential(Embedding(256, 64), *blocks, Linear(64, 256))
        return model, (torch.zeros((8, 32), dtype=torch.int64),)


def test_schedule(schedule_snapshot):
    [compiled] = testing.compile_on_fake_ranks(make, world_size=64, prefetch=1)
    testing.assert_waits_right_before_first_consumer(compiled)
    testing.assert_gathered_buckets_at_most(compiled, 2)
    schedule_snapshot(compiled)
