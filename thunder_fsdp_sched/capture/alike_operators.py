"""Facts about operators, found once for operators that are alike."""

from __future__ import annotations

from typing import Any

from thunder.core.symbol import BoundSymbol

from ..ir.operator_facts import share_facts
from .trace_tokens import Indescribable, TraceTokens

__all__ = ["AlikeOperators"]


class AlikeOperators:
    """The operators of one trace that differ in more than their proxies and parameters."""

    def __init__(self) -> None:
        self._tokens = TraceTokens()
        self._known: dict[Any, tuple[BoundSymbol, tuple[str, ...]]] = {}

    def share_facts(self, bsym: BoundSymbol) -> None:
        """Let a bound symbol have the facts of an earlier one that is alike, if there is one."""
        self._tokens.begin()
        try:
            self._tokens.add_bsym(bsym)
        except Indescribable:
            return
        proxies = self._tokens.proxies
        first, names = self._known.setdefault(tuple(self._tokens.tokens), (bsym, tuple(proxies)))
        if first is not bsym:
            share_facts(bsym, first, dict(zip(names, proxies.values(), strict=True)))
