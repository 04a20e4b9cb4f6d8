"""Tell ``inspect`` the modules of the frames that are on the stack in every test.

Thunder calls ``inspect.stack()`` in each compilation. For a frame whose file belongs to no module, as that of ``python -c``,
``inspect`` compares the files of all modules, for a millisecond each time, and under xdist five frames are of that kind.
"""

from __future__ import annotations

import inspect
import sys


def remember_frames() -> None:
    """Let ``inspect`` find the modules of the present frames at once."""
    inspect.stack()  # finds the files of all modules
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        inspect.modulesbyfile.setdefault(inspect.getabsfile(frame), str(frame.f_globals.get("__name__")))
