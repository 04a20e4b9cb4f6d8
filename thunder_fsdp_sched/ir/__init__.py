"""The symbols in traces, and analyses of traces: effects, lifetimes, operator facts, schedules, repeated regions."""
