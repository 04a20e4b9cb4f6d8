"""Entries of state dicts, and the state dict of a jitted module."""
