"""Which parameters travel together, and where they lie in their buffers: pure data."""
