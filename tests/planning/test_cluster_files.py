"""Clusters described by a file or by single values."""

from __future__ import annotations

import dataclasses
import json

from thunder_fsdp_sched.planning import CLUSTERS, as_json, read_cluster

import pytest
import torch


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


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("{", (), "cannot be read"),
        ("[]", (), "must hold a JSON object, got list"),
        ("{}", (), 'lacks devices_per_node, flops, .*"like": "h100-sxm"'),
        ('{"like": "nowhere"}', (), "unknown 'nowhere'"),
        ('{"like": "b200", "links": 3}', (), "a cluster has no links; its attributes are name,"),
        ('{"like": "b200", "flops": {"float7": 3}}', (), "flops cannot be .*float7"),
        ('{"like": "b200", "memory": "much"}', (), "memory cannot be 'much': .*expected bytes"),
        ('{"like": "b200"}', ["memory_bandwidth=-1"], "cluster 'ours': memory_bandwidth must be positive"),
        ('{"like": "b200"}', ["contention=1"], "contention must be"),
        ('{"like": "b200", "protocols": []}', (), "protocols must hold"),
        ('{"like": "b200"}', ["devices_per_node=2.5"], "devices_per_node must be a positive whole number, got 2.5"),
        ('{"like": "b200", "devices_per_node": true}', (), "devices_per_node cannot be True: expected a number"),
        ('{"like": "b200"}', ["launch_overhead=-1"], "launch_overhead must be zero or positive, and finite, got -1"),
        ('{"like": "b200", "launch_overhead": Infinity}', (), "launch_overhead must be zero or positive, and finite"),
        ('{"like": "b200", "memory_bandwidth": NaN}', (), "memory_bandwidth must be positive, got nan"),
        ('{"like": "b200"}', ["memory_bandwidth=nan"], "memory_bandwidth cannot be 'nan': .*expected bytes"),
        ('{"like": "b200", "memory": 1' + 400 * "0" + "}", (), "memory cannot be 1.*too large"),
        ('{"like": "b200"}', ["memory=0"], "memory must be a positive whole number"),
        ('{"like": "b200"}', ["concurrent=0"], "concurrent must be a positive whole number"),
        ('{"like": "cpu-2core"}', ["gather_share=0"], "gather_share must be more than 0 and at most 1, got 0"),
        (
            '{"like": "cpu-2core"}',
            ["reduction_share=0.5"],
            "gather_share and reduction_share must be at most 1 together",
        ),
        ('{"like": "b200", "reduce_scatter_factor": 0}', (), "reduce_scatter_factor must be positive and finite"),
        ('{"like": "b200", "flops": {"bfloat16": -1}}', (), "flops must give a positive and finite peak"),
        ('{"like": "b200", "flops": {"nn": 1}}', (), "flops cannot be .*torch has no dtype 'nn'"),
        ('{"like": "b200", "flops": 3}', (), "flops cannot be 3: expected an object"),
        (
            '{"like": "b200", "efficiency": {"host": 2}}',
            (),
            "efficiency: host must be more than 0 and at most 1, got 2",
        ),
        ('{"like": "b200", "efficiency": {"gpu": 1}}', (), "an efficiency has no gpu; its attributes are flops,"),
        ('{"like": "b200", "protocols": [{"start": -1}]}', (), "protocols: lacks inter_node_hop, intra_node_hop"),
        ('{"like": "b200", "protocols": 3}', (), "expected a list of objects"),
        ('{"like": "b200", "name": 3}', (), "name cannot be 3: expected text"),
        ('{"like": ["b200"]}', (), "unknown .*b200.*; known are"),
        ('{"like": "b200", "synchronous": 1}', (), "expected true or false"),
        ('{"like": "b200"}', ["backend=mpi"], "backend must be 'nccl' or 'gloo', got 'mpi'"),
        ('{"like": "b200"}', ["synchronous=true"], "backend must be 'gloo' if the host computes"),
        ('{"like": "b200"}', ["contention"], "expected attribute=value, got 'contention'"),
        ('{"like": "b200"}', ["synchronous=1"], "expected true or false"),
        (None, (), "cannot be read"),
    ],
)
def test_invalid_descriptions_are_refused_by_name(tmp_path, content, changes, message):
    path = tmp_path / "ours.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_cluster(str(path), changes)
