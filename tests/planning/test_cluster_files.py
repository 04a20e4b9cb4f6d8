"""Clusters described by a file or by single values."""

from __future__ import annotations

import dataclasses
import json

from thunder_fsdp_sched.planning import CLUSTERS, as_json, read_cluster

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


@pytest.mark.parametrize(
    ("content", "changes", "expected"),
    [
        ("{", (), coded("plan.cluster-file-not-readable")),
        ("[]", (), coded("plan.cluster-file-not-object", "list")),
        ("{}", (), coded("plan.cluster-file-lacks-attributes", "devices_per_node, flops", '"like": "h100-sxm"')),
        ('{"like": "nowhere"}', (), coded("plan.cluster-unknown-name", "nowhere")),
        ('{"like": "b200", "links": 3}', (), coded("plan.cluster-unknown-attributes", "links", "name, source")),
        ('{"like": "b200", "flops": {"float7": 3}}', (), coded("plan.cluster-attribute-invalid", "flops", "float7")),
        (
            '{"like": "b200", "memory": "much"}',
            (),
            coded("plan.cluster-attribute-invalid", "memory", "expected bytes", "'much'"),
        ),
        (
            '{"like": "b200"}',
            ["memory_bandwidth=-1"],
            coded("plan.cluster-attribute-breaks-rule", "cluster 'ours'", "memory_bandwidth", "-1"),
        ),
        ('{"like": "b200"}', ["contention=1"], coded("plan.cluster-attribute-breaks-rule", "contention")),
        ('{"like": "b200", "protocols": []}', (), coded("plan.cluster-without-protocols")),
        (
            '{"like": "b200"}',
            ["devices_per_node=2.5"],
            coded("plan.cluster-attribute-breaks-rule", "devices_per_node", "a positive whole number", "2.5"),
        ),
        (
            '{"like": "b200", "devices_per_node": true}',
            (),
            coded("plan.cluster-attribute-invalid", "devices_per_node", "expected a number", "True"),
        ),
        (
            '{"like": "b200"}',
            ["launch_overhead=-1"],
            coded("plan.cluster-attribute-breaks-rule", "launch_overhead", "zero or positive, and finite", "-1"),
        ),
        (
            '{"like": "b200", "launch_overhead": Infinity}',
            (),
            coded("plan.cluster-attribute-breaks-rule", "launch_overhead", "zero or positive, and finite", "inf"),
        ),
        (
            '{"like": "b200", "memory_bandwidth": NaN}',
            (),
            coded("plan.cluster-attribute-breaks-rule", "memory_bandwidth", "nan"),
        ),
        (
            '{"like": "b200"}',
            ["memory_bandwidth=nan"],
            coded("plan.cluster-attribute-invalid", "memory_bandwidth", "expected bytes", "'nan'"),
        ),
        (
            '{"like": "b200", "memory": 1' + 400 * "0" + "}",
            (),
            coded("plan.cluster-attribute-invalid", "memory", "too large"),
        ),
        (
            '{"like": "b200"}',
            ["memory=0"],
            coded("plan.cluster-attribute-breaks-rule", "memory", "a positive whole number"),
        ),
        (
            '{"like": "b200", "reduce_scatter_factor": 0}',
            (),
            coded("plan.cluster-attribute-breaks-rule", "reduce_scatter_factor", "positive and finite"),
        ),
        ('{"like": "b200", "flops": {"bfloat16": -1}}', (), coded("plan.cluster-flops-not-positive-finite")),
        (
            '{"like": "b200", "flops": {"nn": 1}}',
            (),
            coded("plan.cluster-attribute-invalid", "flops", "dtype 'nn'"),
        ),
        (
            '{"like": "b200", "flops": 3}',
            (),
            coded("plan.cluster-attribute-invalid", "flops", '{"bfloat16": 8e14}'),
        ),
        (
            '{"like": "b200", "efficiency": {"host": 2}}',
            (),
            coded("plan.cluster-attribute-invalid", "efficiency: host", "more than 0 and at most 1", "2.0"),
        ),
        (
            '{"like": "b200", "efficiency": {"gpu": 1}}',
            (),
            coded("plan.cluster-attribute-invalid", "efficiency", "has no gpu", "flops, memory"),
        ),
        (
            '{"like": "b200", "protocols": [{"start": -1}]}',
            (),
            coded("plan.cluster-attribute-invalid", "protocols: lacks inter_node_hop, intra_node_hop"),
        ),
        (
            '{"like": "b200", "protocols": 3}',
            (),
            coded("plan.cluster-attribute-invalid", "protocols", "expected a list of objects"),
        ),
        ('{"like": "b200", "name": 3}', (), coded("plan.cluster-attribute-invalid", "name", "expected text")),
        ('{"like": ["b200"]}', (), coded("plan.cluster-unknown-name", "b200")),
        (
            '{"like": "b200", "synchronous": 1}',
            (),
            coded("plan.cluster-attribute-invalid", "synchronous", "expected true or false"),
        ),
        ('{"like": "b200"}', ["backend=mpi"], coded("plan.cluster-unknown-backend", "mpi")),
        ('{"like": "b200"}', ["synchronous=true"], coded("plan.cluster-synchronous-needs-gloo")),
        ('{"like": "b200"}', ["contention"], coded("plan.cluster-change-without-value", "contention")),
        (
            '{"like": "b200"}',
            ["synchronous=1"],
            coded("plan.cluster-attribute-invalid", "synchronous", "expected true or false"),
        ),
        (None, (), coded("plan.cluster-file-not-readable", "ours.json")),
    ],
)
def test_invalid_descriptions_are_refused_by_name(tmp_path, content, changes, expected):
    path = tmp_path / "ours.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, check=expected):
        read_cluster(str(path), changes)
