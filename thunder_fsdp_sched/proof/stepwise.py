"""Run a program that Thunder has made of a trace statement by statement."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx

from ..ir.inspection import UNPACKING, outs_of
from ..private_thunder import definition_of

RETURN = -1
"""The position at which a program stops before it returns."""

Steps = Generator[Any, None, Any]
"""A run of a program. Before a statement at which it stops it yields the position, after it the values; then it returns."""


def stepwise(program: Callable[..., Any], trace: TraceCtx, stops: Mapping[int, Sequence[str]]) -> Callable[..., Steps]:
    """Return a program that stops before and after some statements, and before its return; decorators are left out.

    Args:
        program: what Thunder has made of the trace; it stays as it is.
        stops: the names of the values to yield after the statement of a bound symbol, by its position.
    """
    function = definition_of(program)
    places = _places(trace, function.body)
    names = {places[position]: (position, values) for position, values in stops.items()}
    names[len(function.body) - 1] = RETURN, ()
    body: list[ast.stmt] = []
    for place, statement in enumerate(function.body):
        if place in names:
            position, values = names[place]
            before, after = ast.parse(f"yield {position}\nyield ({''.join(f'{name}, ' for name in values)})").body
            body += [before, statement, after]
        else:
            body.append(statement)
    function.body, function.decorator_list = body, []
    inner, defined = inspect.unwrap(program), dict[str, Any]()
    code = compile(ast.Module([function], []), inner.__code__.co_filename, "exec")
    exec(code, inner.__globals__, defined)
    steps: Callable[..., Steps] = defined[function.name]
    return steps


def _places(trace: TraceCtx, body: Sequence[ast.stmt]) -> list[int]:
    """Return the index of each bound symbol's statement, the last one if it prints several.

    That of a bound symbol without results follows the statement of the one before it.
    """
    stored: dict[str, int] = {}
    for place, statement in enumerate(body):
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    stored.setdefault(node.id, place)
    places, place = [], -1
    for bsym in trace.bound_symbols:
        if outs := outs_of(bsym):
            place = max(stored.get(name, place) for name in outs)
        elif bsym.sym.id not in UNPACKING and bsym.sym.id is not PrimIDs.COMMENT:
            place += 1
        places.append(place)
    return places
