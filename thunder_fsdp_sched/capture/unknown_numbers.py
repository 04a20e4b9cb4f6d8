"""Numbers that a traced program reads from tensors: only the run of a trace knows their values.

[Note: Unknown numbers]
For ``tensor.item()`` Thunder makes a number without a value. Operators may take it. But Thunder lets Python read it, too:
``bool(None)`` is ``False``, so every comparison would be false, and one branch would run for all inputs. While Thunder
traces a module, each such number that the interpreter wraps gets one of the classes below, whose special methods refuse to
give Python a value. So does every number that operators compute from one. This holds for whatever reads the number: an
instruction of the program, a builtin function, or Thunder's own functions, which compare the arguments of an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from thunder.core.interpreter import ProvenanceRecord, do_raise, wrap_const
from thunder.core.proxies import ComplexProxy, FloatProxy, IntegerProxy, NumberProxy

from ..private_interpreter import call_interpreted
from .refusals import AS_TENSORS, is_in_thunder, refusal, user_line


class UnknownNumber(NumberProxy):
    """A number whose value is not known while tracing.

    Attributes:
        source: the line that made it.
    """

    source = ""

    @staticmethod
    def _elementwise_unary_helper(a: Any, *args: Any) -> Any:
        return _computed(NumberProxy._elementwise_unary_helper, a, *args)

    @staticmethod
    def _elementwise_binary_helper(a: Any, b: Any, *args: Any) -> Any:
        return _computed(NumberProxy._elementwise_binary_helper, a, b, *args)

    def refuse(self, *args: Any) -> NoReturn:
        """Raise the error for a program that needs the value."""
        raise self.error()

    def error(self) -> NotImplementedError:
        """Return the error for a program that needs the value."""
        source = f" at {self.source}" if self.source else ""
        return refusal(
            f"forward uses a number that it reads from a tensor{source} (.item()) as a value of Python, in a branch, a "
            f"comparison, a size, an index or a text. The trace is made once, before the value is known, and would do the "
            f"same for all inputs",
            AS_TENSORS,
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = __str__ = __format__ = refuse


class _UnknownFloat(UnknownNumber, FloatProxy):
    pass


class _UnknownInteger(UnknownNumber, IntegerProxy):
    pass


class _UnknownComplex(UnknownNumber, ComplexProxy):
    pass


_CLASSES = {FloatProxy: _UnknownFloat, IntegerProxy: _UnknownInteger, ComplexProxy: _UnknownComplex}


def mark_unknown(number: NumberProxy, source: str = "") -> None:
    """Let a number without a value refuse to be read. It stays the same object, which the trace refers to."""
    kind = _CLASSES.get(type(number))
    if kind is not None:
        number.__class__ = kind
        number.value, number.source = None, source or user_line()


class UnknownNumbers:
    """The unknown numbers of one traced module."""

    def __init__(self) -> None:
        self._wrapped: dict[int, tuple[ProvenanceRecord, UnknownNumber]] = {}  # by the identity of their provenance

    def note(self, number: NumberProxy, provenance: ProvenanceRecord) -> None:
        """Note a number without a value that the interpreter wraps."""
        mark_unknown(number)
        self._wrapped[id(provenance)] = provenance, number

    def has(self, value: Any) -> bool:
        """Return whether a value is such a number."""
        return isinstance(value, UnknownNumber)

    def check_identity(self, provenance: ProvenanceRecord) -> None:
        """Refuse the program if a value is the result of ``number is True`` or ``number is False``."""
        if getattr(provenance.inst, "opname", None) == "IS_OP":
            one, other = provenance.inputs
            for number, constant in ((one, other), (other, one)):
                if id(number) in self._wrapped and isinstance(constant.value, bool):
                    self._wrapped[id(number)][1].error()

    def look_aside(self, function: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what to call in place of a builtin function that asks for the truth or the type of an unknown number."""
        number = args[0].value if args else None
        if not isinstance(number, UnknownNumber):
            return None
        if function is bool:
            return lambda *_: do_raise(number.error())
        if is_in_thunder():
            return None  # Thunder asks whether the number is a proxy
        if function is type and len(args) == 1:
            return lambda *_: wrap_const(number.python_type)
        if function is isinstance:
            return lambda _, classes: call_interpreted(issubclass, wrap_const(number.python_type), classes)
        return None


def _computed(helper: Callable[..., Any], *operands: Any) -> Any:
    """Return the result of an operator, which is unknown as well if it is a number."""
    unknown = next(operand for operand in operands if isinstance(operand, UnknownNumber))
    try:
        result = helper(*operands)
    except TypeError:  # Thunder converts the number to another type by converting `None`
        raise unknown.error() from None
    if isinstance(result, NumberProxy):
        mark_unknown(result, unknown.source)
    return result
