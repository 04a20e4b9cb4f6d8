"""Direct versions of look-ups for which Thunder's interpreter interprets functions of its own.

[Note: Direct look-ups]
Thunder looks up each global, item and attribute by interpreting a small function of its own, such as ``lambda d, k: d[k]``,
which looks up others. Nine in ten of the instructions that it interprets for a GPT belong to these. ``_HELPERS`` lists
these functions by name, each with a direct version for plain cases: the function that the interpreter has registered for
a method of a builtin container, or an attribute that is found without running Python code. So wrapped values, provenance
and callbacks are the same. All other cases, and functions with another name in another version of Thunder, are still
interpreted. Only ``InputReads`` uses this, in the interpreter's context of one compilation, so other programs are not
affected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from numbers import Number
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from thunder.core.interpreter import (
    WrappedValue,
    get_interpretercompilectx,
    wrap_attribute,
    wrap_const,
)
from thunder.core.jit_ext import MODULE_MEMBER_DICT_ATTRS
from thunder.core.proxies import Proxy, TensorProxy
from thunder.torch.experimental import dtensor_torch_and_prims
from torch.overrides import is_tensor_like

from .private_interpreter import call_interpreted
from .private_iteration import METHODS, next_item, reverse

_Direct = Callable[..., Any]
_Arguments = tuple[WrappedValue, ...]


def direct(function: Any, args: _Arguments, kwargs: dict[str, WrappedValue]) -> _Direct | None:
    """Return a function that does the same as ``function`` with these arguments; ``None`` if it must be interpreted."""
    if (method := METHODS.get(id(function))) is not None:
        return method
    if type(function) is FunctionType:
        choose = _HELPERS.get((function.__module__, function.__qualname__))
        return None if choose is None else choose(function, args, kwargs)
    if function is not getattr:
        return None
    _forget_changed(args[0], args[1].value)
    found = find_attribute(*args) if len(args) == 2 else None
    return None if found is None else lambda *_: found


def unpacks(inst: Any, stack: Any) -> bool:
    """Unpack a list or tuple of the expected length, if ``inst`` does; return whether it is done.

    Thunder would interpret an iterator up to the exception at its end, for which it waits: see [Note: Thread switches while
    tracing] in ``capture.while_compiling``.

    Args:
        stack: the interpreter's, with the operand.
    """
    if inst.opname != "UNPACK_SEQUENCE":
        return False
    sequence = stack.getitem_wrapped(-1)
    items = sequence.value
    if type(items) not in (list, tuple) or len(items) != inst.arg:
        return False
    sequence.track_items()
    pairs = zip(sequence.item_wrappers, items, strict=True)
    if not all(wrapper.value is item or wrapper.original_value is item for wrapper, item in pairs):
        return False  # native code has changed the list, so Thunder raises an error
    stack.pop_wrapped()
    with stack.set_cur_instruction(inst):
        stack.extend(reversed(sequence.item_wrappers))
    return True


#
# Attributes and items
#


def attribute(source: WrappedValue, name: str) -> Any:
    """Return an attribute, wrapped, or the interpreter's signal."""
    key = wrap_const(name)
    return find_attribute(source, key) or call_interpreted(getattr, source, key)


def item(source: WrappedValue, key: WrappedValue) -> Any:
    """Return an item of a builtin container, wrapped, or the interpreter's signal."""
    return call_interpreted(type(source.value).__getitem__, source, key)


def find_attribute(source: WrappedValue, name: WrappedValue) -> WrappedValue | None:
    """Return an attribute, wrapped, if it is found without running Python code; ``None`` otherwise."""
    plain, key = source.value, name.value
    kind = type(plain)
    if isinstance(plain, Proxy) or type(key) is not str or type(kind.__getattribute__) is FunctionType:
        return None
    if key in MODULE_MEMBER_DICT_ATTRS and isinstance(plain, torch.nn.Module):
        return None  # Thunder marks these
    if key in source.attribute_wrappers:
        return source.attribute_wrappers[key]
    if isinstance(plain, type | super) or kind in _NATIVE or (key.startswith("__") and key.endswith("__")):
        value = _native(plain, key)  # as Thunder does
    elif kind.__getattribute__ in _PLAIN_LOOKUPS:
        value = _member(source, plain, kind, key)
    else:
        return None
    return None if value is _NOTHING else wrap_attribute(value, source, name)


def _native(plain: Any, key: str) -> Any:
    try:
        return getattr(plain, key, _NOTHING)
    except Exception:
        return _NOTHING  # the interpreter will raise it again


def _member(source: WrappedValue, plain: Any, kind: type, key: str) -> Any:
    """Return the result of ``object.__getattribute__``, unless that involves a descriptor written in Python."""
    found = of_class(kind, key)
    if type(found) in NATIVE_DESCRIPTORS:
        try:
            return found.__get__(plain, kind)
        except AttributeError:  # an empty slot, for which the class may have `__getattr__`
            return _NOTHING
    is_bound = type(found) in _BINDING
    if not is_bound and found is not _NOTHING and hasattr(type(found), "__get__"):
        return _NOTHING
    attributes = source.attribute_wrappers.get("__dict__")  # a copy, once the program has assigned an attribute
    if attributes is None and hasattr(plain, "__dict__"):
        attributes = wrap_attribute(plain.__dict__, source, wrap_const("__dict__"))
    if attributes is not None:
        if type(attributes.value) is not dict:
            return _NOTHING
        if key in attributes.value:
            return attributes.value[key]
    return found.__get__(plain, kind) if is_bound else found


def of_class(kind: type, key: str) -> Any:
    """Return the entry of a class under the name of an attribute, such as a property."""
    return next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), _NOTHING)


def _forget_changed(source: WrappedValue, key: Any) -> None:
    """Let Thunder look up an attribute again that a property computes, or whose stored value has changed."""
    plain = source.value
    known = None if isinstance(plain, Proxy) or type(key) is not str else source.attribute_wrappers.get(key)
    if known is None:
        return
    attributes = source.attribute_wrappers.get("__dict__")
    of_object = getattr(plain, "__dict__", None) if attributes is None else attributes.value
    stored = of_object.get(key, _NOTHING) if type(of_object) is dict else _NOTHING
    if stored is _NOTHING:
        stored = of_class(type(plain), key)
    if type(stored) not in NATIVE_DESCRIPTORS and stored is not known.value and stored is not known.original_value:
        del source.attribute_wrappers[key]


_NOTHING: Any = object()
_NATIVE = (CellType, MethodType, BuiltinMethodType, MethodWrapperType, partial)
NATIVE_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
"""The types of the descriptors of slots, and of attributes that native code defines."""
_BINDING = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_PLAIN_LOOKUPS: tuple[Any, ...] = (object.__getattribute__, ModuleType.__getattribute__)

#
# Direct versions of Thunder's functions: each chooses one for the arguments, or ``None``
#


def _of_container(method: str, *kinds: type) -> Callable[..., _Direct | None]:
    """Choose the function that the interpreter has registered for a method of builtin containers."""

    def choose(_: Any, args: _Arguments, kwargs: Any) -> _Direct | None:
        kind = type(args[0].value)
        return get_interpretercompilectx().lookaside(getattr(kind, method), *args) if kind in kinds else None

    return choose


def _of_metaclass(_: Any, args: _Arguments, kwargs: Any) -> _Direct | None:
    """Choose the method of a metaclass, such as that of enums, which Thunder does not look for."""
    method = getattr(type(args[0].value), "__getitem__", None)
    return None if method is None else partial(call_interpreted, method)


def _of_type(kind: type, instead: _Direct) -> Callable[..., _Direct | None]:
    """Choose ``instead`` if the first argument is of this type."""
    return lambda _, args, kwargs: instead if type(args[0].value) is kind else None


def _update(_: Any, args: _Arguments, kwargs: Any) -> _Direct | None:
    """Choose a copy of the stored items, if Python would call no methods of either dictionary's class."""
    mapping, new = args
    is_stored = isinstance(mapping.value, dict) and not isinstance(mapping.value, OrderedDict)
    is_stored = is_stored and getattr(type(new.value), "__iter__", None) is dict.__iter__
    return (lambda *_: _merge(mapping, new)) if is_stored else None


def _merge(mapping: WrappedValue, new: WrappedValue) -> Any:
    mapping.track_items()
    new.track_items()
    for key in new.value:  # the wrappers are in the order in which the program has read the items
        call_interpreted(dict.__setitem__, mapping, new.key_wrappers[key], new.item_wrappers[key])
    return wrap_const(None)


def _call_method(method: WrappedValue, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    return call_interpreted(attribute(method, "__func__"), attribute(method, "__self__"), *args, **kwargs)


def _call_partial(function: WrappedValue, /, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    called, bound, named = (attribute(function, name) for name in ("func", "args", "keywords"))
    bound.track_items()
    named.track_items()
    keywords = {key: named.item_wrappers[key] for key in named.value}
    return call_interpreted(called, *bound.item_wrappers, *args, **{**keywords, **kwargs})


def _operator(_: Any, args: _Arguments, kwargs: Any) -> _Direct | None:
    """Choose the operator of a tensor, or that of an object on its right, such as ``__rmul__``, to which torch defers."""
    other, name = args[1].value, args[2].value
    method = getattr(TensorProxy, name, None) if type(args[0].value) is TensorProxy else None
    if method is None:
        return None
    is_in_place = name.startswith("__i")
    reflected = getattr(type(other), f"__r{name[2 + is_in_place :]}", None)
    taken_by_torch = Proxy | torch.Tensor | Number
    if isinstance(reflected, FunctionType) and not isinstance(other, taken_by_torch) and not is_tensor_like(other):
        if is_in_place:
            return lambda *_: wrap_const(NotImplemented)
        return lambda tensor, other, *_: call_interpreted(_reflect, wrap_const(reflected), other, tensor)
    return lambda tensor, other, *_: call_interpreted(method, tensor, other)


def _reflect(operator: Callable[[Any, Any], Any], other: Any, tensor: Any) -> Any:
    result = operator(other, tensor)
    if result is NotImplemented:
        raise TypeError(f"{operator.__name__} of {type(other).__name__} does not take a tensor")
    return result


def _single_device(function: Any, args: _Arguments, kwargs: dict[str, WrappedValue]) -> _Direct | None:
    """Choose an operator for tensors that are not DTensors; Thunder flattens all arguments to find that out."""
    kinds = {type(value.value) for value in (*args, *kwargs.values())}
    if TensorProxy not in kinds or not kinds <= _NO_DTENSORS:
        return None
    cell = function.__closure__[function.__code__.co_freevars.index("single_device_symbol")]
    return partial(call_interpreted, cell.cell_contents)


_NO_DTENSORS = frozenset({TensorProxy, NoneType, bool, int, float, str})
_CONTAINERS = (dict, list, tuple)
_GET_ITEM = _of_container("__getitem__", *_CONTAINERS)
_INTERPRETER = WrappedValue.__module__
_HELPERS: dict[tuple[str, str], Callable[..., _Direct | None]] = {
    (_INTERPRETER, "globals_lookup.<locals>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "_binary_subscr_handler.<locals>.getitem_impl"): _GET_ITEM,
    (_INTERPRETER, "_binary_subscr_handler.<locals>.class_getitem_impl"): _of_metaclass,
    (_INTERPRETER, "_tuple_new_provenance_tracking_lookaside.<locals>.<lambda>"): _GET_ITEM,
    # Before Python 3.12, comprehensions are functions.
    (_INTERPRETER, "wrap_args_from_list.<locals>.<listcomp>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "wrap_args_from_list.<locals>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "wrap_kwargs_from_dict.<locals>.<dictcomp>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "wrap_kwargs_from_dict.<locals>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "_setup_frame_and_run_python_function.<locals>.<listcomp>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "_setup_frame_and_run_python_function.<locals>.<lambda>"): _GET_ITEM,
    (_INTERPRETER, "_contains_op_handler.<locals>.impl"): _of_container("__contains__", *_CONTAINERS),
    (_INTERPRETER, "_len_lookaside.<locals>.impl"): _of_container("__len__", *_CONTAINERS, OrderedDict),
    (_INTERPRETER, "_iter_lookaside.<locals>.nosentinel_impl"): _of_container("__iter__", list, tuple),
    (_INTERPRETER, "_for_iter_handler.<locals>._next_impl"): next_item,
    (_INTERPRETER, "_next_lookaside.<locals>.impl"): next_item,
    (_INTERPRETER, "_reversed_lookaside.<locals>.impl"): _of_type(tuple, reverse),
    (_INTERPRETER, "_list_extend_handler.<locals>.<lambda>"): _of_container("extend", list),
    (_INTERPRETER, "_dict_merge_handler.<locals>.<lambda>"): lambda f, args, named: _update(f, args[::-1], named),
    (_INTERPRETER, "MutMappingWrapperMethods.update.<locals>.impl_other_keys"): _update,
    (_INTERPRETER, "_call_dispatch.<locals>._impl"): _of_type(MethodType, _call_method),
    (_INTERPRETER, "partial_call_lookaside.<locals>.partial_call_impl"): _of_type(partial, _call_partial),
    (_INTERPRETER, "_binary_op.<locals>.outofplace_impl"): _operator,
    (_INTERPRETER, "_binary_op.<locals>.inplace_impl"): _operator,
    (dtensor_torch_and_prims.__name__, "dispatch_to_impl.<locals>.wrapper"): _single_device,
}
