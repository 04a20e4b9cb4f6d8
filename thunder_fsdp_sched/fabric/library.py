"""Lightning Fabric, from whichever of its two packages the program uses.

[Note: Two packages of Fabric]
The distribution ``lightning`` has Fabric as ``lightning.fabric``; ``lightning-fabric`` and ``pytorch-lightning`` have it as
``lightning_fabric``. Each package has its own classes, and a ``Fabric`` accepts strategies of its own package only. Both
may be installed. So classes of ours derive from those of the package that has been imported when they are; of
``lightning.fabric`` if both or neither have been imported, and both are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_PACKAGES = ("lightning.fabric", "lightning_fabric")


def fabric_module(name: str) -> Any:
    """Return a module of Fabric, such as ``"strategies"``.

    Raises:
        ImportError: Fabric is not installed.
    """
    imported = [package for package in _PACKAGES if package in sys.modules]
    for package in imported or _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return importlib.import_module(f"{package}.{name}")
    raise ImportError(
        "thunder_fsdp_sched.fabric needs Lightning Fabric: pip install 'thunder_fsdp_sched[fabric]', or lightning"
    )
