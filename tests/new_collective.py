"""A kind of communication that the package does not have: a broadcast of a bucket, declared in two functions."""

from __future__ import annotations

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.ir.effects import Effects, Issue, Place, Wait, Work
from thunder_fsdp_sched.ir.registry import register
from thunder_fsdp_sched.runtime.memory import Slot
from thunder_fsdp_sched.transports import Traffic

from synthetic_traces import tensor
from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol


def _broadcast(bsym: BoundSymbol) -> Effects:
    bucket, slot, _ = bsym.args
    slot, future, nbytes = slot if isinstance(slot, Slot) else None, bsym.output.name, bucket.spec.unsharded_bytes
    issue = Issue(
        bsym.sym.name,
        future,
        bucket,
        bucket.ranks.group,
        nbytes,
        bucket.spec.param_dtype,
        Place(bucket, slot, bucket.spec.param_dtype),
        gathers=True,
        transport="broadcast",
        traffic=Traffic((nbytes,), 1),
    )
    return Effects(issues=issue, work=Work(), bucket=bucket, uses=slot, in_place=(future,))


def _wait_for_broadcast(bsym: BoundSymbol) -> Effects:
    wait = Wait(bsym.args[1].name, ("broadcast_bucket",))
    return Effects(waits=wait, work=Work(), bucket=bsym.args[0], in_place=(bsym.output.name,))


broadcast = register("broadcast_bucket", print, _broadcast, lambda bucket, slot, shard: FutureTensorProxy(like=shard))
wait_for_broadcast = register("wait_for_broadcast", print, _wait_for_broadcast, lambda bucket, future: tensor())
