# ruff: noqa: F401
"""Internals of the package that several test files use. If a room moves, only this file changes.

Tests of one room import it themselves, and nothing here is of ``extras``.
"""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import passes, pipeline, private_torch
from thunder_fsdp_sched.ir.analysis import BEFORE_TRACE, Analysis
from thunder_fsdp_sched.ir.computation import actions_of
from thunder_fsdp_sched.ir.effects import effects, is_declared
from thunder_fsdp_sched.ir.inspection import AGREEMENT, args_of, outs_of
from thunder_fsdp_sched.ir.operator_facts import facts_of
from thunder_fsdp_sched.ir.read_schedule import schedule_of
from thunder_fsdp_sched.ir.registry import caching
from thunder_fsdp_sched.ir.statements import read_statements
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from thunder_fsdp_sched.plan.layout import make_layout
from thunder_fsdp_sched.plan.specs import BucketOptions
from thunder_fsdp_sched.proof import verify
from thunder_fsdp_sched.proof.verify_again import verify_again
from thunder_fsdp_sched.ranks import channel, control, joint_control, new_groups, open_control, process_groups
from thunder_fsdp_sched.ranks.deadlock import find_fault
from thunder_fsdp_sched.ranks.process_groups import BucketRanks, ProcessGroupRef
from thunder_fsdp_sched.runtime import ops
from thunder_fsdp_sched.runtime.bucket import Bucket
from thunder_fsdp_sched.runtime.memory import Arena, InFlight, slot_bytes
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor
from thunder_fsdp_sched.runtime.rows import Rows
from thunder_fsdp_sched.sharding import shard_module
from thunder_fsdp_sched.transforms.assign_slots import assign_slots
from thunder_fsdp_sched.transforms.sort_communication import sort_communication
from thunder_fsdp_sched.transforms.write_grads_in_place import write_grads_in_place

from thunder.core.symbol import Symbol
from thunder.extend import get_executor


def symbol_named(name: str) -> Symbol:
    """Return the symbol of this package that traces show under a name."""
    return get_executor("fsdp_sched").opmap[name]


def read_schedule(trace: Any) -> Any:
    return schedule_of(read_statements(trace))


def read_program(trace: Any) -> Any:
    return actions_of(read_statements(trace))
