"""Assertions on traces and schedules, for tests in pytest."""

from .extras.testing import *  # noqa: F403
from .extras.testing import __all__ as __all__
