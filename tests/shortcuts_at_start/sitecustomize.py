"""Enable the shortcuts of ``tracing_shortcuts.py`` in every process that starts with this folder in ``PYTHONPATH``.

Python imports this module before anything else. It enables the shortcuts as soon as Thunder has been imported. Until then
it disables the collection of garbage.
"""

from __future__ import annotations

import atexit
import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _ThunderImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that imports ``thunder`` as usual and then enables the shortcuts."""

    _loader: importlib.abc.Loader

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "thunder":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            assert spec.loader is not None
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        sys.meta_path.remove(self)
        self._loader.exec_module(module)
        tests = str(Path(__file__).parents[1])
        sys.path.append(tests)
        from tracing_shortcuts import tracing_shortcuts

        sys.path.remove(tests)
        shortcuts = tracing_shortcuts()
        shortcuts.__enter__()
        atexit.register(shortcuts.__exit__, None, None, None)
        gc.freeze()
        gc.set_threshold(1_000_000)  # see conftest.py
        gc.enable()


gc.disable()  # as in preloaded.py
sys.meta_path.insert(0, _ThunderImporter())
