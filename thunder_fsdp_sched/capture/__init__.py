"""Tracing of sharded models: faster look-ups, checks of inputs, and errors for programs that a trace does not reproduce."""
