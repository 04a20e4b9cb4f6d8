"""Lightning Fabric, from whichever of its two packages the program uses.

[Note: Two packages of Fabric]
The distribution ``lightning`` has Fabric as ``lightning.fabric``; ``lightning-fabric`` and ``pytorch-lightning`` have it as
``lightning_fabric``. Each package has its own classes, and a ``Fabric`` accepts strategies of its own package only. Both
may be installed. So a class of ours gets its base class when the first object is created, by when the program has
imported the one that it uses. ``lightning.fabric`` wins if both have been imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any

__all__ = ["DerivedFromFabric", "fabric_module"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")


def fabric_module(name: str) -> Any:
    """Return a module of Fabric, such as ``"strategies"``.

    Raises:
        ImportError: Fabric is not installed.
    """
    for package in _PACKAGES:
        if package in sys.modules:
            return importlib.import_module(f"{package}.{name}")
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return importlib.import_module(f"{package}.{name}")
    raise ImportError(
        "thunder_fsdp_sched.fabric needs Lightning Fabric: pip install 'thunder_fsdp_sched[fabric]', or lightning"
    )


_Unknown: Any = object  # the methods of the base class are not known to type checkers


class DerivedFromFabric(_Unknown):
    """A class whose objects also have a base class of Fabric: see [Note: Two packages of Fabric].

    Attributes:
        fabric_base: the name of the base class, and before a colon that of its module.
    """

    fabric_base: str
    _origin: type | None = None  # the class that can be imported

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        own: Any = cls
        module, _, name = cls.fabric_base.partition(":")
        base = getattr(fabric_module(module), name)
        return object.__new__(own if issubclass(cls, base) else _derive(own, base))

    def __reduce__(self) -> Any:
        return _blank, (self._origin or type(self),), self.__dict__


@functools.cache
def _derive(cls: Any, base: Any) -> Any:
    body = {"__doc__": cls.__doc__, "_origin": cls}
    return types.new_class(cls.__name__, (cls, base), exec_body=lambda names: names.update(body))


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)
