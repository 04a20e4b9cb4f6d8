"""Clusters described by a file or by single values."""

from __future__ import annotations

import dataclasses
import json
import math

from thunder_fsdp_sched.planning import CLUSTERS, ClusterSpec, as_json, read_cluster

import pytest
import torch
from coded import coded


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
