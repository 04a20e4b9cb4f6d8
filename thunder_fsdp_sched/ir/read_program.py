"""Read from a trace what it issues and waits for; loaded if there are several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..ranks.messages import Action
from .statements import Statement


def actions_of(statements: Sequence[Statement]) -> list[Action]:
    """Return the sequence of issues and waits of a trace, the input of ``deadlock.find_fault``.

    The line of a reduction names the parameters of the bucket that have no gradient in this trace. A rank that lacks a
    gradient returns none to autograd, whatever the others send for its rows, so ranks must lack the same.
    """
    actions: list[Action] = []
    issued: list[Action] = []
    hooks = 0
    for statement in statements:
        e, issue = statement.effects, statement.issue
        if statement.waits_for is not None:
            actions.append(issued[statement.waits_for.number]._replace(waits=True))
        if e.hook is not None and e.bucket is not None:
            # It may communicate on any group, so it counts as a collective of all ranks that share the bucket.
            bucket, hooks = e.bucket, hooks + 1
            ranks = bucket.ranks.all_ranks
            called = Action(
                f"all_reduce_hook {e.hook} {bucket.spec.name}", f"hook of ranks {ranks}", ranks, False, -hooks
            )
            actions += [called, called._replace(waits=True)]
        if issue is not None and e.bucket is not None and issue.group is not None:
            spec, group = e.bucket.spec, issue.group
            line = f"{issue.kind} {spec.name} {issue.nbytes} bytes {issue.dtype} {issue.sent_by}"
            line += "".join(f" {name}={mark}" for name, mark in issue.marks.items())
            if missing := [spec.params[index].name for index in e.missing_gradients]:
                line += f" without gradients of {', '.join(missing)}"
            issued.append(
                Action(line, group.name or group.description, tuple(group.global_ranks), False, statement.number)
            )
            actions.append(issued[-1])
    return actions
