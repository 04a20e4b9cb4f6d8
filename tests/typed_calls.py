"""Calls of ``fsdp`` and its options, which ``make types`` checks: users' type checkers see the same. No test.

A comment that ignores an error is itself an error if there is none.
"""

from thunder_fsdp_sched import CommPolicy, Debug, FSDPTransform, Init, Ranks, Sharding, fsdp

import torch
from typing_extensions import assert_type

transform = fsdp(sharding_strategy="zero3", bucketing_strategy="25MB", max_memory="3GB", cluster="h100-sxm")
assert_type(transform, FSDPTransform)
fsdp(prefetch="auto", comm_policy=CommPolicy("int8", exempt=["a"]), mp_policy=lambda name, module: None)
fsdp("zero3")  # type: ignore[call-arg]
fsdp(prefetchs=1)  # type: ignore[call-arg]
fsdp(prefetch="x")  # type: ignore[arg-type]
fsdp(mp_policy=torch.bfloat16)  # type: ignore[arg-type]
fsdp(comm_policy="int8")  # type: ignore[arg-type]
Sharding("zero2", release=True)
Sharding("zero2", True)  # type: ignore[call-arg]
Sharding(release="step")  # type: ignore[arg-type]
Init("cuda", ignored_params=["a"])
Init(device=3)  # type: ignore[arg-type]
Ranks(mesh="mesh")  # type: ignore[arg-type]
Debug(False)  # type: ignore[call-arg]
CommPolicy(block="3")  # type: ignore[arg-type]

# The stored types are narrower, and the classes frozen.
assert_type(Sharding().release, bool)
assert_type(Init().device, torch.device | None)
assert_type(Debug().check_passes, bool)
assert_type(transform.options.max_memory, int | None)
assert_type(transform.options.debug, Debug)
Debug().audit = False  # type: ignore[misc]
