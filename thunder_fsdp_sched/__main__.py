"""The command line, ``python -m thunder_fsdp_sched``: see ``extras.command_line``."""

from .extensions import load

if __name__ == "__main__":
    load("extras.command_line:app")(prog_name="python -m thunder_fsdp_sched")
