"""Replacements for methods of modules that FSDP and DDP wrap.

``docs/from-fsdp2.md`` has those of FSDP2 with links.
"""

from __future__ import annotations

_NO_SYNC = "run the micro-batches that are not to be reduced in `with model.no_sync():`"
_GATHERED = (
    "`with thunder_fsdp_sched.unsharded(model, ...):` to change whole parameters, `eager(model)` to call modules "
    "uncompiled, `stream_full_parameters(model)` to read parameters"
)
_NOT_NEEDED = "remove the call, nothing takes its place"

_FIXES = {
    "unshard": _GATHERED,
    "summon_full_params": _GATHERED,
    "reshard": "remove the call: unsharded parameters are freed by themselves, and at the end of unsharded() and eager()",
    "reset_iter_state": "remove the call; after a backward under no_sync that failed, discard_unreduced(model)",
    "set_is_last_backward": _NOT_NEEDED,
    "set_requires_gradient_sync": _NO_SYNC,
    "set_requires_all_reduce": f'fsdp(accumulate="sharded"), and {_NO_SYNC}',
    "set_reshard_after_forward": 'fsdp(sharding_strategy="zero3") for True, "zero2" for False',
    "set_reshard_after_backward": "fsdp(sharding_strategy=Sharding(reshard_after_backward=...))",
    "set_modules_to_forward_prefetch": "fsdp(prefetch=...), a number of buckets",
    "set_modules_to_backward_prefetch": "fsdp(prefetch=...), a number of buckets",
    "set_custom_all_gather": "fsdp(transport=...)",
    "set_custom_reduce_scatter": "fsdp(transport=...)",
    "set_all_reduce_hook": "fsdp(all_reduce_hook=...)",
    "register_comm_hook": "fsdp(all_reduce_hook=...), or fsdp(comm_policy=...) for low precision",
    "set_post_optim_event": _NOT_NEEDED,
    "set_reduce_scatter_divide_factor": "thunder_fsdp_sched.set_gradient_divide_factor(model, factor)",
    "set_gradient_divide_factor": "thunder_fsdp_sched.set_gradient_divide_factor(model, factor)",
    "set_force_sum_reduction_for_comms": _NOT_NEEDED,
    "set_reduce_scatter_unused_params": "fsdp(ranks_may_differ=True)",
    "set_reduce_scatter_max_input_buffers": _NOT_NEEDED,
    "set_separate_reduce_scatter_group": "fsdp(ranks=Ranks(separate_reduce_scatter_group=True))",
    "set_unshard_in_backward": _NOT_NEEDED,
    "set_allocate_memory_from_process_group_for_comm": _NOT_NEEDED,
    "set_symm_mem_for_comm": 'fsdp(transport="symmetric_memory")',
    "set_manual_backward_finalization": _NOT_NEEDED,
    "finalize_backward": _NOT_NEEDED,
    "set_keep_unsharded_storage": _NOT_NEEDED,
}


def fix_of(name: str) -> str:
    """Return what to do instead of calling the method ``name``."""
    return _FIXES.get(name, "it is a method of another library; docs/from-fsdp2.md lists what takes the place of which")
