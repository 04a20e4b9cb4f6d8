"""Messages that list what each rank does, and where ranks differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

MAY_DIFFER = "If ranks are meant to run different blocks or constants, give fsdp(ranks_may_differ=True)"
"""The end of a message about programs that differ between ranks."""


class Action(NamedTuple):
    """One action of a program: issuing a collective, or waiting for one."""

    line: str  # a readable description of the collective, the same on all ranks
    group: str  # the name of its process group, the same on all members
    ranks: tuple[int, ...]  # the members, by global rank
    waits: bool  # whether the action is the wait for a collective that was issued earlier
    number: int  # of the collective in this program


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Group ranks by their texts, in order of appearance."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def sides(texts: Mapping[int, str]) -> str:
    """Return one line for each distinct text, with its ranks."""
    return "\n".join(f"    {named(ranks)}: {text}" for text, ranks in ranks_by_text(sorted(texts.items())).items())


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def first_difference(first: int, ours: Sequence[str], other: int, theirs: Sequence[str], where: str = "") -> str:
    """Return the first line that differs between the texts of the ranks ``first`` and ``other``; empty if none does."""
    for number, (a, b) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="(nothing)"), 1):
        if without_remarks(a) != without_remarks(b):
            a, b = (_REMARK.sub(r"\1", line) for line in (a, b))
            return f"line {number}{where}:\n    rank {first}: {a}\n    rank {other}: {b}"
    return ""


def remark(text: str) -> str:
    """Return ``text`` marked as part of a line that messages show but ranks do not compare."""
    return f"\x02{text}\x03"


def without_remarks(line: str) -> str:
    """Return the part of a line that ranks compare."""
    return _REMARK.sub("", line)


_REMARK = re.compile("\x02(.*?)\x03")


def first_different(parts: Mapping[int, tuple[Hashable, Hashable]]) -> tuple[int, int] | None:
    """Return the first two ranks with the same key but different values, given each rank's key and value."""
    first: dict[Hashable, int] = {}
    for rank, (key, value) in parts.items():
        like = first.setdefault(key, rank)
        if parts[like][1] != value:
            return like, rank
    return None
