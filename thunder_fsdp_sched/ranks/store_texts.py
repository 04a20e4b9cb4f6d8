"""Exchange of texts through a store, for ranks whose channel does not exist yet or is broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


def exchange_texts(store: Store, prefix: str, ranks: Sequence[int], text: str, patience: timedelta) -> dict[int, str]:
    """Publish this rank's text in a store; return those of the ranks that publish theirs in time, keyed by rank.

    Each rank makes 6 requests, and one rank 7 more, for any number of ranks. All ranks read the text of the first rank
    to come, and every text that differs from it.

    Args:
        prefix: no rank may use it twice, because ranks are counted, and the last one to read deletes the texts.
    """
    return publish_text(store, prefix, ranks, text)(patience)


def publish_text(store: Store, prefix: str, ranks: Sequence[int], text: str) -> Callable[[timedelta], dict[int, str]]:
    """Do the first half of :func:`exchange_texts`, and return a function that does the second one."""
    key = {name: f"{prefix}/{name}" for name in ("first", "others", "came", "count", "all", "read")}
    own = json.dumps([dist.get_rank(), text])
    _, common = json.loads(store.compare_set(key["first"], "", own))
    if text != common:
        store.append(key["others"], f"{own}\n")  # type: ignore[attr-defined]  # torch's stubs lack it
    store.append(key["came"], f"{dist.get_rank()} ")  # type: ignore[attr-defined]
    if store.add(key["count"], 1) == len(ranks):
        store.set(key["all"], "")

    def texts(patience: timedelta) -> dict[int, str]:
        try:
            store.wait([key["all"]], patience)
            came = ranks
        except RuntimeError:  # each kind of store raises another type
            came = [int(rank) for rank in store.get(key["came"]).split()]
        texts = dict.fromkeys(came, common)
        if store.check([key["others"]]):
            texts.update(map(json.loads, store.get(key["others"]).splitlines()))
        if store.add(key["read"], 1) == len(ranks):
            for name in key.values():
                store.delete_key(name)
        return texts

    return texts
