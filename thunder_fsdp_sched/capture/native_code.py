"""Instructions and methods that read values natively, outside of the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable

GLOBAL_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
CELL_STORES = frozenset({"STORE_DEREF", "DELETE_DEREF"})
"""The instructions that assign or delete a global, and a variable of a function that others share."""

CALL_NOTHING = frozenset({callable, isinstance, issubclass, super, type, getattr, hasattr})
"""Builtins that read no contents of their arguments."""

READ_ITEMS = frozenset({"__getitem__", "__len__", "__setitem__"})
"""Methods of containers that read no other items than those under their arguments."""

NATIVE_OPERANDS: dict[str, Callable[[int], Iterable[int]]] = {
    "COMPARE_OP": lambda arg: (-1, -2),
    "BUILD_MAP": lambda arg: range(-2 * arg, 0, 2),
    "BUILD_SET": lambda arg: range(-arg, 0),
    **dict.fromkeys(("SET_ADD", "SET_UPDATE", "DICT_UPDATE"), lambda arg: (-1,)),
    "MAP_ADD": lambda arg: (-2,),
}
"""Instructions that the interpreter does not interpret further, and where on the stack the values are that they compare
or take hashes of, by their argument."""
