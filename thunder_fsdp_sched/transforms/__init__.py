"""The trace passes, one per file, all with the signature ``pass_(trace, ...) -> trace``; each records its provenance.

``thunder_fsdp_sched.transform`` lists the order in which they run in Thunder's pipeline.

Each docstring shows lines of a trace before and after the pass. Unless it names another model, they come from three
blocks of ``Linear(64, 64, bias=False)`` and ``relu`` on two ranks, with the default options. ``...`` stands for what
was cut.
"""

from ..proof import VerificationError, verify
from .assign_slots import assign_slots
from .bucket_communication import bucket_communication
from .claim_operators import claim_operators
from .differentiate import differentiate
from .draw_once import draw_once, mark_draws, refuse_merged_draws, refuse_redrawn_gradients
from .end_backward import end_backward
from .extend_arena import release_extension
from .fuse_downcast import fuse_downcast
from .gather_from_secondary import gather_from_secondary
from .guard_kept import guard_first, guard_kept
from .guard_outputs import guard_outputs
from .insert_agreement import insert_agreement
from .insert_unshard import insert_unshard
from .keep_fusions_apart import keep_fusions_apart, remove_cuts
from .offload_activations import offload_activations, offloadable, offloaded_values
from .regather_for_backward import regather_for_backward
from .release_slots import release_slots
from .replay_schedule import ScheduleMismatch, replay_schedule
from .reuse_from_forward import mark_retained_by_forward, reuse_from_forward
from .reuse_in_window import reuse_in_window
from .shard_prologue import refuse_foreign_parameters, shard_prologue, unpacked_parameters
from .sort_communication import sort_communication
from .sort_host_copies import sort_host_copies
from .sort_within_budget import sort_within_budget
from .write_grads_in_place import share_written_in_place, write_grads_in_place

__all__ = [
    "ScheduleMismatch",
    "VerificationError",
    "bucket_communication",
    "claim_operators",
    "differentiate",
    "draw_once",
    "end_backward",
    "fuse_downcast",
    "gather_from_secondary",
    "guard_first",
    "guard_kept",
    "guard_outputs",
    "insert_agreement",
    "insert_unshard",
    "keep_fusions_apart",
    "mark_draws",
    "mark_retained_by_forward",
    "assign_slots",
    "offload_activations",
    "offloadable",
    "offloaded_values",
    "refuse_foreign_parameters",
    "refuse_merged_draws",
    "refuse_redrawn_gradients",
    "regather_for_backward",
    "release_extension",
    "release_slots",
    "remove_cuts",
    "replay_schedule",
    "reuse_from_forward",
    "reuse_in_window",
    "shard_prologue",
    "share_written_in_place",
    "sort_communication",
    "sort_host_copies",
    "sort_within_budget",
    "unpacked_parameters",
    "verify",
    "write_grads_in_place",
]
