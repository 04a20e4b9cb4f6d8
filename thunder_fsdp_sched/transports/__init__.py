"""How a bucket travels: one file a transport, one small interface."""

from .all_gather import AllGatherTransport
from .base import Transport

__all__ = ["AllGatherTransport", "Transport"]
