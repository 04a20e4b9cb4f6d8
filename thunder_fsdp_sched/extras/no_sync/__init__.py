"""Accumulation of gradients under ``no_sync``."""
