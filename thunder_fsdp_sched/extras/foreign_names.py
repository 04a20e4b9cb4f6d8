"""Replacements for options of earlier releases and other libraries, and for methods of modules that FSDP and DDP wrap.

``docs/from-fsdp2.md`` has those of FSDP2 with links.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import coded_error
from ..option_groups import OptionGroup
from ..options import Options

_SPELLINGS = {
    "reshard_after_forward": (
        'sharding_strategy="zero3" for True, "zero2" for False, and Sharding(secondary_ranks=8) for a number'
    ),
    "stage": 'sharding_strategy="zero2" or "zero3"',
    "release": 'sharding_strategy=Sharding(release=True) for "step"',
    "auto_wrap_policy": "bucketing_strategy=..., by default a bucket for each block; no module is wrapped",
    "bucket_cap_mb reduce_bucket_size allgather_bucket_size": 'bucketing_strategy="25MB", for example',
    "backward_prefetch forward_prefetch": "prefetch=..., a number of buckets, for forward and backward",
    "max_unsharded_bytes": "max_memory=..., which also chooses what stays unsharded and how far ahead buckets are gathered",
    "limit_all_gathers": "max_gathers_in_flight=..., a number",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(...) of torch.distributed.fsdp",
    "cpu_offload": "offload_policy=CPUOffloadPolicy() of torch.distributed.fsdp",
    "process_group": "ranks=process_group",
    "mesh device_mesh": "ranks=mesh",
    "dp_mesh_dims": "ranks=mesh['replicate', 'shard']",
    "device_id": "init=Init(device=...)",
    "sync_module_states": "init=Init(broadcast_from=0)",
    "ignored_modules ignored_states": "init=Init(ignored_params=...), parameters or their names",
    "allow_different_initialization": "init=Init(allow_different_values=True)",
    "allow_different_computation": "ranks_may_differ=True",
    "find_unused_parameters": "left out, or ranks_may_differ=True if ranks use different parameters",
    "use_orig_params gradient_as_bucket_view static_graph overlap_comm": "left out: it is always so",
    "shard_placement_fn": "left out: parameters are cut along dim 0",
    "gradient_accumulation_steps": "left out: run micro-batches in `with model.no_sync():`",
    "gradient_clipping": "left out: call clip_grad_norm_(model, max_norm)",
    "move_state_dict_to_cpu": "stream_full_parameters(model) or save_safetensors(model, path)",
}
OPTIONS = {name: spelling for names, spelling in _SPELLINGS.items() for name in names.split()}
"""The spelling of options of earlier releases, FSDP, DDP and DeepSpeed."""

_NO_SYNC = "run the micro-batches that are not to be reduced in `with model.no_sync():`"
_GATHERED = (
    "`with thunder_fsdp_sched.unsharded(model, ...):` to change whole parameters, `eager(model)` to call modules "
    "uncompiled, `stream_full_parameters(model)` to read parameters"
)
_NOT_NEEDED = "remove the call, nothing takes its place"

_METHODS = {
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
    """Return the advice that replaces a call of the method ``name``."""
    return _METHODS.get(
        name, "it is a method of another library; docs/from-fsdp2.md lists what takes the place of which"
    )


def unknown_option(name: str, known: Iterable[str]) -> TypeError:
    """Return the error of an option that ``fsdp`` does not have: how it is spelled, or which known one is similar."""
    parts = {
        part: f"{option}={type(group).__name__}({part}=...)"
        for option, group in vars(Options()).items()
        if isinstance(group, OptionGroup)
        for part in group.declared()
    }
    if now := {**parts, **OPTIONS}.get(name):
        return coded_error(TypeError, "option.renamed-option", name=name, now=now)
    close = difflib.get_close_matches(name, known, n=1)
    hint = "".join(f"; did you mean {each!r}?" for each in close)
    return coded_error(TypeError, "option.no-such-option", name=name, hint=hint)
