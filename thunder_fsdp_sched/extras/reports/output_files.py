"""Files that a command will write, checked before its work begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import coded_error


class OutputFile(NamedTuple):
    """A file that an option names.

    Attributes:
        path: the file to write; ``None`` if the option is not given.
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
            raise coded_error(
                ValueError, "command.output-file-named-twice", option=option, other=other, path=output.path
            )
        existed = output.path.exists()
        try:
            output.path.open("ab").close()
        except OSError as error:
            hint = "" if output.path.parent.is_dir() else f"; create the folder {output.path.parent}"
            raise coded_error(
                ValueError,
                "command.output-not-writable",
                option=option,
                path=output.path,
                reason=error.strerror,
                hint=hint,
            ) from error
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
            raise coded_error(ValueError, "environment.option-needs-matplotlib", option=option) from error
        known += [f".{name}" for name in sorted(FigureCanvasBase.get_supported_filetypes())]
    if suffix not in known:
        raise coded_error(
            ValueError, "command.output-unknown-file-ending", option=option, path=output.path, known=" or ".join(known)
        )
