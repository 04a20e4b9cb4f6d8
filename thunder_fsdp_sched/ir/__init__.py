"""The symbols in traces, and analyses of traces: aliases, operator facts, schedules, deadlocks."""
