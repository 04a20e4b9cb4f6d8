"""Pages for the source files that other pages link to as ``../thunder_fsdp_sched/….py``, which is where they are on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\(\.\./(thunder_fsdp_sched/[\w/]+\.py)\)")


def on_files(files: Files, *, config: Any) -> Files:
    texts = [Path(page.abs_src_path).read_text() for page in files.documentation_pages() if page.abs_src_path]
    for path in sorted({path for text in texts for path in _LINK.findall(text)}):
        content = f'---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n````python\n--8<-- "{path}"\n````\n'
        files.append(File.generated(config, f"source/{path}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, **context: Any) -> str:
    return _LINK.sub(r"](source/\1.md)", markdown)
