"""Reads the fields of options as what they are at run time: the parameters of a constructor, and of ``fsdp``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


def _classes(parent: griffe.Object) -> Iterator[griffe.Class]:
    for member in parent.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _classes(member)


def _parameters(options: griffe.Class) -> Iterator[griffe.Parameter]:
    """Yield what the dataclass has made of ``name: type = option(default=..., check=...)``."""
    kind = griffe.ParameterKind.positional_or_keyword
    for name, field in options.attributes.items():
        annotation, value = field.annotation, field.value
        if str(annotation) == "KW_ONLY":
            kind = griffe.ParameterKind.keyword_only
        elif isinstance(value, griffe.ExprCall) and str(value.function) == "option":
            default = next(each.value for each in value.arguments if each.name == "default")
            if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Option":
                annotation = annotation.slice.elements[0]
            yield griffe.Parameter(name, annotation=annotation, kind=kind, default=default)


class OptionFields(griffe.Extension):
    """Gives parameters to the constructors of options, and to functions that take those of a constructor."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for options in _classes(pkg):
            if parameters := list(_parameters(options)):
                constructor = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), returns="None")
                options.set_member("__init__", constructor)
        fsdp, options = pkg["api.fsdp"], pkg["options.Options"]
        fsdp.parameters = griffe.Parameters(*_parameters(options))
