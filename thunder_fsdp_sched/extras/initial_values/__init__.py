"""Initial values that this rank does not have: those of another one, or of a function (``fsdp(init=Init(...))``)."""
