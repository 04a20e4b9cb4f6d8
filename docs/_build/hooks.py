"""Hooks of the documentation build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPTIONAL = {"Understand and extend": [("virtual_gpu.md", "The virtual GPU")]}
"""Pages that enter the navigation if they exist, by section."""


def on_config(config: Any) -> Any:
    """Add the optional pages to the navigation."""
    for entry in config["nav"]:
        for section, pages in OPTIONAL.items():
            if section in entry:
                for path, title in pages:
                    if (Path(config["docs_dir"]) / path).exists():
                        entry[section].append({title: path})
    return config
