"""The command line, ``python -m thunder_fsdp_sched``: see ``extras.command_line``."""

import sys

from .compat import start
from .extensions import load


def main() -> None:
    """Run the command that is named, or print what there is, which needs neither torch nor Thunder."""
    app = load("extras.commands:outline")()
    if any(argument in load("extras.commands:COMMANDS") for argument in sys.argv[1:2]):
        start()
        app = load("extras.command_line:app")
    app(prog_name="python -m thunder_fsdp_sched")


if __name__ == "__main__":
    main()
