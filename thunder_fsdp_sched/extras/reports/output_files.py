"""Files that a command will write, checked before its work begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class OutputFile(NamedTuple):
    """A file that an option names.

    Attributes:
        path: where to write; ``None`` if the option is not given.
        picture: whether it may be a picture, in any format of matplotlib.
        data: whether it may be ``.json``.
    """

    path: Path | None
    picture: bool = False
    data: bool = False


def check_outputs(outputs: Mapping[str, OutputFile]) -> None:
    """Raise an error if a file cannot be written, so that no work is lost.

    Args:
        outputs: the files, keyed by option.

    Raises:
        ValueError: names the option and the path: the format is unknown, matplotlib is missing, the folder does not exist,
            the file cannot be written, or two options name one file.
    """
    options: dict[Path, str] = {}
    for option, output in outputs.items():
        if output.path is None:
            continue
        _check_format(option, output)
        if (other := options.setdefault(output.path.resolve(), option)) != option:
            raise ValueError(f"{option}: {other} already writes {output.path}")
        existed = output.path.exists()
        try:
            output.path.open("ab").close()
        except OSError as error:
            hint = "" if output.path.parent.is_dir() else f"; create the folder {output.path.parent}"
            raise ValueError(f"{option}: {output.path} cannot be written: {error.strerror}{hint}") from error
        if not existed:
            output.path.unlink()


def _check_format(option: str, output: OutputFile) -> None:
    assert output.path is not None
    suffix = output.path.suffix.lower()
    if output.data and suffix == ".json":
        return
    known = [".json"] if output.data else []
    if output.picture:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise ValueError(f"{option}: pictures need matplotlib: pip install 'thunder_fsdp_sched[plot]'") from error
        known += [f".{name}" for name in sorted(FigureCanvasBase.get_supported_filetypes())]
    if suffix not in known:
        raise ValueError(f"{option}: the name {output.path} must end with {' or '.join(known)}")
