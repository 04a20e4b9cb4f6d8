"""Everything that the fork server of ``ranks`` imports before it forks the first process."""

from __future__ import annotations

import gc
import os

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without this folder; see fork_server
gc.disable()  # imports make a million objects that stay; looking through them takes a fifth of the time of importing

import thunder_fsdp_sched  # noqa: E402, F401

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401
import thunder  # noqa: E402, F401
import torch.distributed.checkpoint  # noqa: E402, F401
import tracing_shortcuts  # noqa: E402, F401

gc.freeze()
gc.set_threshold(1_000_000)  # see conftest.py
gc.enable()
