"""Planned steps: models compiled as one of many ranks, clusters and their costs, simulated timelines, memory."""

from .extras.planning.clusters import CLUSTERS, ClusterSpec, Efficiency, Protocol, as_json, cluster, read_cluster
from .extras.planning.cost import AnalyticCost
from .extras.planning.dry_run import DryRun, MicroBatches, compile_as_rank, dry_run_step
from .extras.planning.fit import describe_fit, with_optimizer
from .extras.planning.models import find_model
from .extras.planning.recorded import RecordedStep, read_recorded
from .extras.planning.search import Candidate, Choice, MemoryLimitError
from .extras.planning.simulate import simulate
from .extras.planning.timeline import Timeline
from .extras.step_memory.step_memory import optimizer_state_bytes, optimizer_step_bytes

__all__ = [
    "CLUSTERS",
    "AnalyticCost",
    "Candidate",
    "Choice",
    "ClusterSpec",
    "DryRun",
    "Efficiency",
    "MemoryLimitError",
    "MicroBatches",
    "Protocol",
    "RecordedStep",
    "Timeline",
    "as_json",
    "cluster",
    "compile_as_rank",
    "describe_fit",
    "dry_run_step",
    "find_model",
    "optimizer_state_bytes",
    "optimizer_step_bytes",
    "read_cluster",
    "read_recorded",
    "simulate",
    "with_optimizer",
]
