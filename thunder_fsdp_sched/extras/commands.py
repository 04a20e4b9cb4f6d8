"""The commands and their help. ``--help`` imports this alone; ``command_line`` has the commands themselves."""

from __future__ import annotations

import typer

COMMANDS = {
    "trace": "Show the communication of a model's forward and backward traces, before and after sorting.\n\n"
    "This runs in one process, with a fake process group that sends no data.",
    "plan": "Plan a training step on a cluster that you do not have: memory, time, and exposed communication.\n\n"
    "The model is traced on the meta device as one of many ranks, scheduled, and simulated. Deep models take minutes, "
    "nearly all of it in Thunder's own tracing.",
    "bench": "Measure a training step of your model beside PyTorch's FSDP2 and DDP.\n\n"
    "Start it with torchrun. The systems take turns, so all of them are in memory at once. Without GPUs it measures on the "
    "CPU, with gloo.",
    "clusters": "Print the presets of clusters as JSON, the format of files for --cluster.",
    "exposed": "Show the communication that compute did not hide, in the steps that torch's profiler recorded of any "
    "training run on GPUs.\n\n"
    "Record with torch.profiler.profile and export_chrome_trace. Times are milliseconds a step.",
    "diff": "Show the differences between two saved schedules. The exit status is 1 if there are any.",
}


def make_app() -> typer.Typer:
    """Return the command line without a command."""
    return typer.Typer(
        help="ZeRO-2 and ZeRO-3 for Lightning Thunder, scheduled in the trace.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        rich_markup_mode=None,  # whose tables cut names of options at 80 columns
    )


def outline() -> typer.Typer:
    """Return the command line with commands that do nothing, for its help."""
    app = make_app()
    for name, text in COMMANDS.items():
        app.command(name, help=text)(lambda: None)
    return app
