"""Transports that ``transport=`` asks for and ``"auto"`` never chooses."""
