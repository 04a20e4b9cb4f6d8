"""Pictures and Perfetto files of simulated steps."""

from __future__ import annotations

import json
from dataclasses import replace

from thunder_fsdp_sched.ir.symbols import fsdp_all_gather
from thunder_fsdp_sched.planning.clusters import cluster
from thunder_fsdp_sched.planning.cost import AnalyticCost
from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.transforms.assign_slots import assign_slots
from thunder_fsdp_sched.transforms.sort_communication import sort_communication

import pytest
from synthetic_traces import chain


@pytest.fixture(scope="module")
def timeline():
    cost = AnalyticCost(cluster("h100-sxm"))
    return simulate(assign_slots(sort_communication(chain(4), prefetch=1)), None, cost)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_timelines_draws_each_timeline_with_its_lanes(timeline, tmp_path, ending):
    pytest.importorskip("matplotlib")
    from thunder_fsdp_sched.reports.plot import plot_timelines

    # Slots that are not shared: as many rows as are in use at once.
    timeline = replace(timeline, slots=tuple(use._replace(slot=f"slot_{n}") for n, use in enumerate(timeline.slots)))
    figure = plot_timelines([("before", timeline), ("after", timeline)], tmp_path / f"steps.{ending}")
    assert (tmp_path / f"steps.{ending}").stat().st_size > 1000
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [t.split(":")[0] for t in titles] == ["before", "after"]
    assert all("launch gaps" in title and "exposed communication" in title for title in titles)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "launch gap: the device waits for the host" in legend
    lanes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert lanes[0] == "compute"
    most = max(sum(use.start <= start < use.end for use in timeline.slots) for start, *_ in timeline.memory)
    assert lanes[2:] == [f"unsharded {row}" for row in range(1, most + 1)]
    widest = max(len(line) for title in titles for line in title.splitlines())
    assert widest <= 140


def test_a_perfetto_file_holds_every_collective_with_its_times(timeline, tmp_path):
    from thunder_fsdp_sched.reports.plot import save_perfetto

    save_perfetto(timeline, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    gathers = [e for e in events if e["ph"] == "X" and e["cat"] == fsdp_all_gather.name and "position" in e["args"]]
    expected = [i for i in timeline.intervals if i.kind == fsdp_all_gather.name]
    assert [(e["ts"], e["dur"]) for e in gathers] == [(i.start * 1e6, i.seconds * 1e6) for i in expected]
    peak = max(e["args"]["bytes"] for e in events if e["ph"] == "C")
    assert peak == timeline.peak_unsharded_bytes
