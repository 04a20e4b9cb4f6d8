"""Clusters described by a file or by single values."""

from __future__ import annotations

import dataclasses
import json

from thunder_fsdp_sched.extras.planning.clusters import CLUSTERS, as_json, read_cluster

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
    spec = read_cluster(str(path), ["devices_per_node=4", "launch_overhead=2e-6", "memory=40GiB", "synchronous=true"])
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
