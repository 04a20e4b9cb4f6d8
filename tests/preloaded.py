"""Everything that the fork server of ``ranks`` imports before it forks the first process.

Forked processes collect garbage as Python does by default. After collecting garbage, the server freezes the objects of
imports: modules, classes and functions, which live until a process ends. None of them belongs to a test. Objects that a
test drops are found as ever, a little more often: Python postpones a full collection until the new objects are a
quarter of those that it has examined before.
"""

from __future__ import annotations

import gc
import os

os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]  # without this folder; see fork_server

import thunder_fsdp_sched  # noqa: F401

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import thunder  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
from known_frames import remember_frames

remember_frames()
gc.collect()
gc.freeze()
