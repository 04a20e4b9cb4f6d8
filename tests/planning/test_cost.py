"""The cost model: FLOPs as torch counts them, times that can be worked out by hand, presets, and clusters in files.

No test depends on how long anything takes.
"""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

from thunder_fsdp_sched import BucketSpec
from thunder_fsdp_sched.extras.planning.clusters import cluster_of_this_process
from thunder_fsdp_sched.extras.planning.cost import ring_seconds
from thunder_fsdp_sched.extras.step_memory.rows import StepRows
from thunder_fsdp_sched.kernels.calls import call_operator
from thunder_fsdp_sched.planning import CLUSTERS, AnalyticCost, ClusterSpec, Efficiency, Protocol, as_json, read_cluster
from thunder_fsdp_sched.testing import compile_on_fake_ranks
from thunder_fsdp_sched.transports import TRANSPORTS, Traffic
from thunder_fsdp_sched.transports.flat import Flat

import pytest
import thunder
import torch
from coded import coded
from internals import effects, fsdp_all_gather, fsdp_reduce_scatter, fsdp_wait_grads, fsdp_wait_params
from models import modeled
from synthetic_traces import make_bucket, tensor
from thunder.core import dtypes, prims
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import torchex
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PLAIN = ClusterSpec(
    name="plain",
    source="made up: one FLOP/s, byte/s and second each, so that times are counts",
    devices_per_node=4,
    memory=10**9,
    flops={torch.float32: 1.0, torch.bfloat16: 2.0},
    memory_bandwidth=1.0,
    intra_node_bandwidth=8.0,
    inter_node_bandwidth=1.0,
    protocols=(Protocol(start=100.0, intra_node_hop=1.0, inter_node_hop=10.0),),
    launch_overhead=0.0,
)


#
# Clusters
#


@pytest.mark.parametrize(
    ("device_name", "major", "gigabytes", "nearest"),
    [
        ("NVIDIA GH200 480GB", 9, 102, "h100-sxm"),
        ("NVIDIA H20-141GB", 9, 150, "h200-sxm"),
        ("NVIDIA GB200", 10, 198, "b200"),
        ("NVIDIA RTX A1000", 8, 8, "a100-sxm"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 8, 10, "a100-sxm"),
        ("Tesla T4", 7, 16, "a100-sxm"),
        ("NVIDIA H100 PCIe", 9, 85, "h100-sxm"),
        ("NVIDIA H100 NVL", 9, 100, "h100-sxm"),
        ("NVIDIA H200 NVL", 9, 150, "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", 8, 42, "a100-sxm"),
        ("NVIDIA A100-PCIE-40GB", 8, 42, "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", 8, 85, "a100-sxm"),
    ],
)
def test_a_gpu_without_a_preset_gets_the_nearest_one_with_a_warning(
    device_name, major, gigabytes, nearest, monkeypatch
):
    properties = SimpleNamespace(major=major, total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device_name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    with pytest.warns(UserWarning, match=rf"{device_name}.* '{nearest}'"):
        assert cluster_of_this_process() is CLUSTERS[nearest]


@pytest.mark.filterwarnings("error")
def test_only_machines_that_a_preset_describes_get_it_without_a_warning(monkeypatch):
    names = iter(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "NVIDIA B200"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: next(names))
    for preset in ("h100-sxm", "h200-sxm", "a100-sxm", "a100-sxm", "b200"):
        assert cluster_of_this_process() is CLUSTERS[preset]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="'cpu-2core'"):
        assert cluster_of_this_process() is CLUSTERS["cpu-2core"]


#
# Collectives
#


def test_a_ring_inside_a_node_takes_the_time_of_its_hops_and_of_its_bytes_on_one_link():
    # 3 hops of 1 s, and 3/4 of 64 bytes at 8 bytes/s.
    assert ring_seconds(PLAIN, 64, range(4)) == 100 + 3 * 1 + 48 / 8
    assert ring_seconds(PLAIN, 64, range(4), passes=2) == 100 + 2 * (3 * 1 + 48 / 8)
    assert ring_seconds(PLAIN, 64, range(1)) == 0
    assert ring_seconds(PLAIN, 0, range(4)) == 0


def test_a_ring_between_nodes_uses_one_network_interface_for_each_member_in_a_node():
    # 8 ranks in 2 nodes: 6 hops inside a node, 1 between nodes; the 4 interfaces of a node together send 4 bytes/s.
    assert ring_seconds(PLAIN, 64, range(8)) == 100 + 6 * 1 + 10 + 56 / 4
    # One rank in each of 4 nodes: no hops inside a node, one interface.
    assert ring_seconds(PLAIN, 64, range(0, 16, 4)) == 100 + 3 * 10 + 48 / 1
    # Two ranks in each of 2 nodes.
    assert ring_seconds(PLAIN, 64, [0, 1, 4, 5]) == 100 + 2 * 1 + 10 + 48 / 2


def test_the_fastest_protocol_is_used_and_efficiency_is_applied():
    spec = dataclasses.replace(
        PLAIN,
        protocols=(*PLAIN.protocols, Protocol(0.0, 0.0, 0.0, bandwidth_share=0.5)),
        efficiency=Efficiency(intra_node=0.5),
    )
    assert ring_seconds(spec, 64, range(4)) == 48 / 4 / 0.5
    large = 6400
    assert ring_seconds(spec, large, range(4)) == 100 + 3 + 0.75 * large / 4


def test_the_time_of_a_collective_follows_from_the_layout_of_its_bucket():
    one = make_bucket("b", [(4, 4)])
    cost = AnalyticCost(PLAIN)
    assert collective_seconds(cost, one) == [ring_seconds(PLAIN, 64, range(2))] * 2
    gloo = AnalyticCost(dataclasses.replace(PLAIN, reduce_scatter_factor=2.0))
    assert collective_seconds(gloo, one) == [ring_seconds(PLAIN, 64, range(2), passes=passes) for passes in (1, 2)]
    half = make_bucket("b", [(4, 4)], dtype=torch.bfloat16)
    assert collective_seconds(cost, half) == [ring_seconds(PLAIN, 32, range(2))] * 2
    eight = make_bucket("b", [(4, 4)], world_size=8)
    nbytes = eight.spec.layout.segments[0].shard_numel * 8 * 4
    assert collective_seconds(cost, eight)[0] == ring_seconds(PLAIN, nbytes, range(8))


def collective_seconds(cost: AnalyticCost, bucket) -> list[float]:
    """Return the time of a bucket's gather and of its reduction."""

    def write():
        fsdp_all_gather(bucket, None, tensor())
        fsdp_reduce_scatter(bucket, None, tensor())

    return [cost.collective_seconds(effects(bsym).issues) for bsym in traced(write).bound_symbols]


#
# Bound symbols
#

COUNTS_FLOPS = dataclasses.replace(PLAIN, flops=dict.fromkeys(PLAIN.flops, 1.0), memory_bandwidth=1e30)
"""A cluster on which only FLOPs take time, one second each."""


def traced(write) -> TraceCtx:
    trace = TraceCtx()
    with tracectx(trace):
        write()
    return trace


def device_seconds(trace: TraceCtx, spec: ClusterSpec = PLAIN) -> list[float]:
    return [s.device for s in seconds(AnalyticCost(spec), trace)]


def seconds(cost: AnalyticCost, *traces: TraceCtx) -> list[Any]:
    return [cost.seconds(row) for row in StepRows(*traces).rows]


def test_an_operand_used_twice_is_read_once_and_selecting_reads_only_what_it_returns():
    def write():
        x = tensor(10)
        prims.mul(x, x)
        torchex.gather(tensor(1000, 8), 0, tensor(3, 8, dtype=dtypes.int64))

    assert device_seconds(traced(write)) == [4 * 20, 3 * 4 * 24]


def executed(function, *shapes) -> TraceCtx:
    """Return the trace that runs a function on float32 tensors of these shapes."""
    jitted = thunder.jit(function)
    jitted(*(torch.randn(shape) for shape in shapes))
    return thunder.last_traces(jitted)[-1]


def test_views_cost_only_host_time_and_reshaping_a_transposed_value_is_a_copy():
    trace = executed(lambda x: (x.view(6, 4), x.reshape(6, 4).transpose(0, 1).flatten()), (2, 3, 4))
    spec = dataclasses.replace(PLAIN, launch_overhead=5.0, kernel_overhead=1.0)
    view, copy = (5.0, 0.0), (5.0, 1.0 + 2 * 96)
    found = [s for s in seconds(AnalyticCost(spec), trace) if s.host]
    assert set(found) == {view, copy} and found.count(copy) == 1


def test_backward_reads_an_expanded_value_that_forward_has_saved_as_few_bytes():
    jitted = thunder.jit(lambda x: x.expand(1000, 8) * x.expand(1000, 8))
    jitted(torch.randn(8, requires_grad=True)).sum().backward()
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    products = [row for row in StepRows(*traces).rows if row.bsym.sym.name == "mul"]
    gradients = [row for row in products if row.trace == 1]
    assert gradients and all(AnalyticCost(PLAIN).seconds(row).device == 4 * (8000 + 8 + 8000) for row in gradients)


def test_a_fusion_costs_its_inputs_and_outputs_and_the_flops_inside():
    trace = traced(lambda: prims.neg(prims.exp(prims.matmul(tensor(2, 3), tensor(3, 5)))))
    inside = tuple(trace.bound_symbols)
    bsym = Symbol("fusion0", is_fusion=True).bind(*inside[0].args, output=inside[-1].output, subsymbols=inside)
    trace.bound_symbols = [bsym]
    assert device_seconds(trace) == [4 * (6 + 15 + 10)]
    assert device_seconds(trace, COUNTS_FLOPS) == [60]


def test_copying_gradients_into_the_reduction_slot_has_a_cost():
    one = make_bucket("b", [(4, 4), (4,)])

    def write():
        fsdp_wait_params(one, fsdp_all_gather(one, None, tensor(2, 4), None))
        fsdp_wait_grads(one, fsdp_reduce_scatter(one, None, tensor(4, 4), None))

    spec = dataclasses.replace(PLAIN, launch_overhead=1.0)
    # Two segments need two launches; one gradient is copied.
    assert seconds(AnalyticCost(spec), traced(write)) == [(2.0, 0.0), (1.0, 0.0), (3.0, 128.0), (1.0, 0.0)]


def test_flops_of_causal_attention_exclude_the_masked_half():
    sdpa = pytest.importorskip("thunder.executors.sdpaex")
    batch, heads, length, size = 2, 3, 16, 8
    with tracectx(TraceCtx()):
        query, result = (tensor(batch, heads, length, size, dtype=dtypes.bfloat16) for _ in range(2))
    products = 2 * batch * heads * length * length * size

    def counted(causal: bool, memory_efficient: bool = True) -> int:
        symbol = sdpa.sdpea_gradfwd if memory_efficient else sdpa.sdpfa_gradfwd
        mask = (None,) if memory_efficient else ()
        trace = TraceCtx()
        trace.bound_symbols = [symbol.bind(query, query, query, *mask, 0.0, causal, output=result)]
        return sum(device_seconds(trace, COUNTS_FLOPS))

    assert counted(False) == 2 * products
    assert counted(True) == products
    assert counted(True, memory_efficient=False) == products
    with tracectx(trace := TraceCtx()):
        backward = sdpa.sdpea_bwd.bind(
            query, query, query, query, None, query, query, query, query, 0.0, False, output=(result,) * 3
        )
    trace.bound_symbols = [backward]
    assert device_seconds(trace, COUNTS_FLOPS) == [5 * products]
    with tracectx(trace := TraceCtx()):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        call_operator(flash, query, query, query, 0.0, True)
        gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        call_operator(gradient, *[query] * 5, tensor(batch, heads, length), 0.0, False)
    assert device_seconds(trace, COUNTS_FLOPS) == [products, 5 * products]


@modeled(
    convolution=partial(nn.Conv2d, 3, 8, 3, padding=1, stride=2),
    linear=partial(nn.Linear, 8 * 16, 20),
    head=partial(nn.Linear, 20, 5, bias=False),
)
def Mixed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A convolution, linear layers and batched products."""
    y = torch.relu(self.convolution(x)).flatten(1)
    z = torch.nn.functional.gelu(self.linear(y)).view(-1, 4, 5)
    return self.head((torch.softmax(z @ z.transpose(1, 2), -1) @ z).flatten(1)).sum()


@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_a_model_equal_those_of_torchs_counter(backward):
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(6, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        result = model(x)
        if backward:
            result.backward()
    jitted = thunder.jit(model)
    with torch.set_grad_enabled(backward):
        jitted(x)
    traces = [thunder.last_traces(jitted)[-1], *(thunder.last_backward_traces(jitted)[-1:] if backward else [])]
    counted = sum(sum(device_seconds(trace, COUNTS_FLOPS)) for trace in traces)
    assert round(counted) == counter.get_total_flops()


class Relayed(Flat):
    """An invented transport that sends each segment around the ring three times, in two launches, with copies."""

    name = "relayed"

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        return Traffic((spec.unsharded_bytes,), launches=2, passes=3.0, copied_before=10, copied_after=20)

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        return Traffic((spec.grad_bytes,) * 2, launches=4, copied_before=30, copied_after=40)


def test_a_registered_transport_costs_the_traffic_that_it_declares(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "relayed", Relayed())
    [compiled] = compile_on_fake_ranks(
        lambda: (nn.Linear(4, 4, bias=False), (torch.ones(2, 4),)), world_size=2, transport="relayed"
    )
    issues = [effects(b).issues for b in (*compiled.forward.bound_symbols, *compiled.backward.bound_symbols)]
    issued, reduced = [
        issue for issue in issues if issue is not None and issue.bucket is not None and not issue.resident
    ]
    gloo = {"backend": "gloo", "synchronous": True, "reduce_scatter_factor": 2.0}
    on_cpu = AnalyticCost(dataclasses.replace(PLAIN, **gloo, launch_overhead=1.0))
    on_gpu = AnalyticCost(dataclasses.replace(PLAIN, launch_overhead=1.0, reduce_scatter_factor=2.0))
    gather, reduction = ring_seconds(PLAIN, 64, range(2), passes=3), 2 * ring_seconds(PLAIN, 64, range(2))
    assert on_cpu.collective_seconds(issued) == gather
    assert on_cpu.collective_seconds(reduced) == reduction
    assert on_gpu.collective_seconds(issued) == gather + 20 / PLAIN.bytes_per_second
    assert on_gpu.collective_seconds(reduced) == reduction + 40 / PLAIN.bytes_per_second

    def at(cost, trace, name):
        pairs = zip(trace.bound_symbols, seconds(cost, trace), strict=True)
        [found] = [s for b, s in pairs if b.sym.name == name]
        return found.host, found.device * PLAIN.bytes_per_second

    issues = [(compiled.forward, "fsdp_all_gather"), (compiled.backward, "fsdp_reduce_scatter")]
    waits = [(compiled.forward, "fsdp_wait_params"), (compiled.backward, "fsdp_wait_grads")]
    # The copy before the collective counts in the issue. The copy after it counts in the wait on a CPU.
    assert [at(on_cpu, *issue) for issue in issues] == [at(on_gpu, *issue) for issue in issues] == [(3, 10), (5, 30)]
    assert [at(on_cpu, *wait) for wait in waits] == [(2, 20), (2, 40)]
    assert [at(on_gpu, *wait) for wait in waits] == [(1, 0), (1, 0)]


#
# Clusters in files
#


def test_every_preset_survives_saving_and_reading(tmp_path):
    for name, spec in CLUSTERS.items():
        (tmp_path / "cluster.json").write_text(as_json(spec))
        assert read_cluster(str(tmp_path / "cluster.json")) == spec
        assert read_cluster(name) is spec


def test_a_file_changes_a_preset_and_values_change_the_file(tmp_path):
    path = tmp_path / "ours.json"
    content = {
        "like": "h100-sxm",
        "inter_node_bandwidth": "25GB",
        "flops": {"bfloat16": 8e14},
        "efficiency": {"flops": 0.5},
    }
    path.write_text(json.dumps(content))
    changes = ["devices_per_node=4", "launch_overhead=2e-6", "memory=40GiB", "synchronous=true", "backend=gloo"]
    spec = read_cluster(str(path), changes)
    like = CLUSTERS["h100-sxm"]
    assert spec.name == "ours" and "h100-sxm" in spec.source
    assert spec.inter_node_bandwidth == 25e9 and spec.flops == {**like.flops, torch.bfloat16: 8e14}
    assert spec.efficiency == dataclasses.replace(like.efficiency, flops=0.5)
    assert (spec.devices_per_node, spec.launch_overhead, spec.memory) == (4, 2e-6, 40 * 2**30) and spec.synchronous
    assert spec.protocols == like.protocols


def test_each_number_may_be_given_on_the_command_line():
    for field in dataclasses.fields(ClusterSpec):
        value = getattr(CLUSTERS["cpu-2core"], field.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert getattr(read_cluster("cpu-2core", [f"{field.name}={value}"]), field.name) == value


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, coded("plan.cluster-file-not-readable", "ours.json")),
        ("{", coded("plan.cluster-file-not-readable")),
        ("[]", coded("plan.cluster-file-not-readable", "list")),
        ("{}", coded("plan.cluster-file-lacks-attributes", "devices_per_node, flops", '"like": "h100-sxm"')),
        ('{"like": "nowhere"}', coded("plan.cluster-unknown-name", "nowhere")),
        ('{"like": ["b200"]}', coded("plan.cluster-unknown-name", "b200")),
    ],
)
def test_files_without_a_cluster_are_refused(tmp_path, content, expected):
    path = tmp_path / "ours.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, check=expected):
        read_cluster(str(path))


RULE, VALUE = "plan.cluster-attribute-breaks-rule", "plan.cluster-attribute-invalid"


@pytest.mark.parametrize(
    ("attribute", "value", "code", "words"),
    [
        ("links", 3, "plan.cluster-unknown-attributes", ["links", "name, source"]),
        ("memory", "much", VALUE, ["memory", "expected bytes", "'much'"]),
        ("memory", 10**400, RULE, ["memory", "a positive whole number"]),
        ("devices_per_node", True, RULE, ["devices_per_node", "True"]),
        ("memory_bandwidth", math.nan, RULE, ["memory_bandwidth", "positive", "nan"]),
        ("launch_overhead", math.inf, RULE, ["launch_overhead", "zero or positive, and finite", "inf"]),
        ("reduce_scatter_factor", 0, RULE, ["reduce_scatter_factor", "positive"]),
        ("name", 3, RULE, ["name", "text"]),
        ("synchronous", 1, RULE, ["synchronous", "true or false"]),
        ("flops", 3, VALUE, ["flops"]),
        ("flops", {"float7": 3}, VALUE, ["flops", "float7"]),
        ("flops", {"nn": 1}, RULE, ["flops", "dtype"]),
        ("flops", {"bfloat16": -1}, RULE, ["flops", "positive"]),
        ("flops", {"bfloat16": "fast"}, RULE, ["flops", "fast"]),
        ("efficiency", {"host": 2}, VALUE, ["efficiency", "host", "more than 0 and at most 1"]),
        ("efficiency", {"gpu": 1}, VALUE, ["efficiency", "gpu"]),
        ("protocols", [], RULE, ["at least one protocol"]),
        ("protocols", 3, VALUE, ["protocols"]),
        ("protocols", [{"start": -1}], VALUE, ["protocols", "inter_node_hop"]),
    ],
)
def test_values_in_files_are_refused_by_name(tmp_path, attribute, value, code, words):
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"like": "b200", attribute: value}))
    with pytest.raises(ValueError, check=coded(code, *words)):
        read_cluster(str(path))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("contention", "plan.cluster-change-without-value", ["contention"]),
        ("contention=1", RULE, ["contention", "in [0, 1)"]),
        ("memory_bandwidth=-1", RULE, ["ClusterSpec b200", "memory_bandwidth", "-1"]),
        ("memory_bandwidth=nan", VALUE, ["memory_bandwidth", "expected bytes", "'nan'"]),
        ("devices_per_node=2.5", RULE, ["devices_per_node", "a positive whole number", "2.5"]),
        ("memory=0", RULE, ["memory", "a positive whole number"]),
        ("backend=mpi", RULE, ["backend", "mpi"]),
        ("synchronous=1", RULE, ["synchronous", "true or false"]),
        ("synchronous=true", "plan.cluster-synchronous-needs-gloo", []),
        ("flops=3", VALUE, ["flops"]),
    ],
)
def test_values_on_the_command_line_are_refused_by_name(change, code, words):
    with pytest.raises(ValueError, check=coded(code, *words)):
        read_cluster("b200", [change])
