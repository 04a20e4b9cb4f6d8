"""The pytest plugin: ``schedule_snapshot`` pins the schedule of a model in a file next to the test.

pytest loads this file in every run, and with it torch and Thunder; ``-p no:thunder_fsdp_sched`` disables it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["schedule_snapshot"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("thunder_fsdp_sched")
    group.addoption(
        "--update-schedules", action="store_true", help="write the schedules that schedule_snapshot compares with"
    )


@pytest.fixture
def schedule_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a model's schedule with the file ``schedules/<test>.json`` next to the test.

    ``schedule_snapshot(jitted)`` accepts a jitted module after a call, an fsdp transform or compiled traces, and a
    ``name=`` if a test pins several schedules. If the schedules differ, the test fails and shows the difference;
    ``pytest --update-schedules`` accepts it. The test also fails if the file is missing: write it with
    ``--update-schedules`` and commit it. ``fsdp(schedule=...)`` replays these files.
    """
    update = request.config.getoption("--update-schedules")

    def compare(subject: Any, *, name: str = "") -> None:
        __tracebackhide__ = True
        from thunder_fsdp_sched.extras.replay import load_schedules, save_schedules
        from thunder_fsdp_sched.extras.testing import step_schedule

        schedule = step_schedule(subject)
        stem = re.sub(r"\W+", "_", f"{request.path.stem}_{request.node.name}_{name}").strip("_")
        path = Path(request.path).parent / "schedules" / f"{stem}.json"
        if update:
            path.parent.mkdir(exist_ok=True)
            save_schedules([schedule], path)
            return
        if not path.exists():
            pytest.fail(f"no schedule is pinned in {path}; run pytest --update-schedules and commit the file")
        [pinned] = load_schedules(path)
        if pinned != schedule:
            difference = pinned.diff(schedule) or "the computation around it is another"
            pytest.fail(f"the schedule is not the one pinned in {path} (--update-schedules accepts it):\n{difference}")

    return compare
