"""Checks of all that a program reads from its inputs, because its trace depends on more than tensors and numbers.

[Note: Guarded inputs]
Thunder's prologue checks the tensors, numbers and strings that a program reads. It does not check ``None``, the length of a
tuple, the keys of a dictionary, a dtype, or an enum, so a trace would also run for a call in which the program takes
another branch. While Thunder traces the module, each value that the interpreter wraps is noted here, with its path from
the arguments or the module. The prologue checks these values (``fsdp_check_inputs``), and Thunder traces again if one
differs.

The comparison depends on the type of the value:

- a list or tuple by type and length, a dictionary by type and keys; items that the program reads have their own paths;
- ``None``, functions, getters, classes and members of enums by identity; dtypes, sets and other plain values by equality;
- any other object by its type, but a global object by identity;
- whether an object has an attribute, if the program asks.

Parameters, submodules and hooks are not compared, because they must not change or are checked elsewhere. Nor are methods
of objects other than modules, or values that libraries read from their own modules.

Thunder's epilogue stores attributes that a program assigns if they are tensors or numbers. The prologue assigns strings
and other constants, such as ``self.config.problem_type = "regression"``, once all checks have passed.

The checks also find state that a program changes in a list or dictionary, such as ``self.losses.append(loss)``: tracing
changes it, but running the trace would not. The new prologue then refuses the very call that it was made for, with an
error that says so.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from contextlib import nullcontext
from inspect import CO_GENERATOR
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodDescriptorType, NoneType
from typing import Any

import torch
from thunder.core.compile_data import get_cache_option
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    get_interpretercompilectx,
    interpretercompilectx,
    is_opaque,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx, should_register_for_prologue
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import NumberProxy, Proxy, StringProxy, TensorProxy

from ..extensions import load
from ..private_interpreter import (
    READS,
    has_been_modified,
    identify_key,
    observed_by,
    replace_key,
    unique_checks,
    unique_name,
)
from ..private_lookups import direct
from ..private_thunder import fixed_shapes
from ..private_torch import find_hooks, remove_other_hooks
from ..runtime.traced_inputs import (
    CONDITIONS,
    ENVIRONMENT,
    EQUAL,
    HAS,
    IS,
    TYPE,
    Check,
    Condition,
    Environment,
    Links,
    TracedInputs,
)
from . import callbacks, module_members, torch_functions, torch_types
from .changing_values import READ_ENVIRONMENT, ForeignIterators, changing_value, environment_read, set_default
from .containers import Containers, with_plain_containers
from .input_checks import CHECKED_BY_THUNDER, COMPARED, IGNORED, check_of, is_checked, may_differ
from .instructions import INSTEAD, OUTER_STORES, outer_assignment
from .leaves import CALLS, Leaves
from .paths import ATTRIBUTE, FUNCTION, INPUTS, ITEM, ConcretePaths, Path, Paths
from .refusals import collect_refusals, is_of_program
from .unsupported import call_for_one_result, own_iterator, unsupported_call
from .while_compiling import sooner_switches


class InputReads:
    """The checks of the values that one jitted module reads from its inputs in the present compilation.

    Attributes:
        leaves: the modules that are not traced; ``None`` if all are.
    """

    def __init__(self) -> None:
        self._trace: Any = None
        self._depth = 0  # of the running call of a module, within that of the outermost one
        self._checks: dict[Path, Check] = {}
        self._module: torch.nn.Module | None = None
        self._links = Links()
        self._sizes: Any = None  # the `Sizes`, with symbolic values
        self.leaves: Leaves | None = None

    def call(
        self, call: Callable[..., Any], module: WrappedValue, /, *args: WrappedValue, **kwargs: WrappedValue
    ) -> Any:
        """Let ``call`` trace a call of a module, with wrapped values, and note what it reads if it is the outermost one."""
        context = get_jit_ctx()
        if context.computation_trace is self._trace:
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1
        self._trace, self._checks, self._paths = context.computation_trace, {}, ConcretePaths()
        self._assigned: list[tuple[Path, str, Any]] = []
        self._suspended: dict[int, tuple[Any, str]] = {}  # frames of generators, with the line
        self._conditions, self._depth, self._links = list[Condition](), 0, Links()
        # The first module that has an object, by the identity of the object's provenance.
        self._holders: dict[int, tuple[ProvenanceRecord, dict[str, Any], str]] = {}
        self._names: dict[str, torch.Tensor] = {}
        if self.leaves is not None:
            self.leaves.written.clear()
        self._shapes = torch_types.Shapes()
        self._unknown: Any = None  # the `UnknownNumbers`, once there is one
        self._iterators, self._containers = ForeignIterators(), Containers(self._paths)
        self._is_root = self._paths.of(module.provenance) == (FUNCTION,)
        self._module = unwrap(module)
        hooks = {number for number, _ in find_hooks(self._module.modules())}
        is_symbolic = get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES
        self._sizes = load("extras.symbolic_sizes:Sizes")() if is_symbolic else None
        for value in (*args, *kwargs.values()):
            self._note(value)
        observed = interpretercompilectx(observed_by(get_interpretercompilectx(), self, _CONSTANTS))
        with observed, sooner_switches, unique_checks(context), collect_refusals() as refused:
            try:
                result = call(module, *args, **kwargs)
                if self._suspended and result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
                    from .generators import error_of_left

                    result = do_raise(error_of_left(self._suspended))
                elif (
                    self.leaves is not None and self.leaves.calls and result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED
                ):
                    load("extras.leaf_modules.capture:error_of_shared_write")(self.leaves)  # the error is collected
            except Exception:
                if not refused:  # otherwise an instruction that the interpreter does not interpret has raised a refusal
                    self._undo(unwrap(module), hooks)
                    raise
                result = INTERPRETER_SIGNALS.EXCEPTION_RAISED
            finally:
                if self.leaves is not None:
                    self.leaves.arguments.clear()
            if refused:
                result = do_raise(refused[0])
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            result = with_plain_containers(result)
        has_failed = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED
        is_automatic = self.leaves is not None and self.leaves.automatic
        if is_automatic and not has_failed and (changed := self._containers.changed()) is not None:
            result = load("extras.leaf_modules.capture:explain_change")(self.leaves, changed) or result
            has_failed = result is INTERPRETER_SIGNALS.EXCEPTION_RAISED
        if has_failed:
            self._undo(unwrap(module), hooks)
        if self._sizes is not None:
            self._checks.update(self._sizes.checks(context.computation_trace.bound_symbols))
        if not has_failed and has_been_modified(context):
            from ..private_assignments import forget_new_modules, save_attributes_of_root, take_constants

            forget_new_modules(context)
            self._assigned = take_constants(context, self._object_at)
            save_attributes_of_root(context)
        return result

    def _undo(self, module: torch.nn.Module, hooks: set[int]) -> None:
        """Undo changes of a failed trace: containers would hold its proxies, and the next trace would add hooks again."""
        self._containers.restore()
        remove_other_hooks(module.modules(), hooks)

    def _object_at(self, provenance: ProvenanceRecord) -> Path | None:
        """Return the path of an object that each call has; ``None`` for others."""
        path = self._paths.of(provenance)
        if path is None or path[0] not in _ROOTS:
            return None
        return path if self._is_root or path[0] != FUNCTION else None

    def take(self) -> TracedInputs | None:
        """Return the checks of the compilation that has just been traced; ``None`` if its module was not called."""
        module, checks = self._module, self._checks
        if module is not None:
            checks.update(self._containers.checks())
        self._trace, self._checks, self._module, self._names, self._holders = None, {}, None, {}, {}
        self._suspended = {}
        if module is None:
            return None
        return TracedInputs(module if self._is_root else None, checks, self._links, self._assigned, self._conditions)

    def wrap(self, wrap: Callable[[WrappedValue], object], value: WrappedValue) -> None:
        """Note a value that the interpreter wraps.

        Computed keys are replaced by constants: Thunder derives the name of a tensor from constant keys only, and would take
        two tensors for one.
        """
        provenance = value.provenance
        if provenance.inst in READS and len(provenance.inputs) == 2:
            known = self._paths.keys.get(id(provenance.inputs[1]))
            if known is not None and not isinstance(known[1], Proxy):
                replace_key(value, known[1])
            identify_key(value)
        if isinstance(value.value, torch.Tensor):
            is_fixed = self._sizes is not None and isinstance(value.value, torch.nn.Parameter)
            with fixed_shapes() if is_fixed else nullcontext(), unique_name(value, self._names):
                wrap(value)
        else:
            own_iterator(value.value)  # the error is collected
            wrap(value)
        self._note(value)

    def interpret(self, interpret: Callable[..., Any], inst: Any, /, **state: Any) -> Any:
        """Interpret an instruction, note what it reads, and refuse what a trace would not reproduce."""
        stack = state["stack"]
        if inst.opname in OUTER_STORES and (error := outer_assignment(inst, state["frame"], self._paths)) is not None:
            return do_raise(error)
        self._containers.note_instruction(inst, stack)
        if inst.opname == "LOAD_GLOBAL":
            self._note_global(unwrap(state["frame"].globals), inst.argval, state["frame"].code.co_filename)
        if inst.opname == "IS_OP":  # the error is collected
            torch_types.error_of_identity(stack.getitem_wrapped(-1), stack.getitem_wrapped(-2))
        if (instead := INSTEAD.get(inst.opname)) is not None and (done := instead(inst, stack)) is not NotImplemented:
            return done
        if state["frame"].code.co_flags & CO_GENERATOR:
            from .generators import interpret as interpret_in_generator  # here, because many programs have none

            interpret = functools.partial(interpret_in_generator, self._suspended, interpret)
        if self._sizes is not None:
            return self._sizes.interpret(interpret, inst, **state)
        return interpret(inst, **state)

    def look_aside(self, look_aside: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return what to call in place of a function, note what it reads, and refuse what a trace would not reproduce."""
        leaves = self.leaves if self.leaves is not None and self.leaves.automatic else None
        # As a leaf, a function runs as it is that `unsupported_call` would refuse.
        if leaves is not None and id(function) in CALLS:
            if (leaf := load("extras.leaf_modules.choose:function_to_call")(function, args)) is not None:
                return functools.partial(load("extras.leaf_modules.choose:call_function"), leaves, *leaf)
        # Before `direct`, which would answer `getattr`.
        if function is getattr and self.leaves and self.leaves.written:
            if (error := load("extras.leaf_modules.capture:error_of_traced_read")(self.leaves, *args[:2])) is not None:
                return do_raise(error)
        # Most calls are these, so all that follows would take time for nothing.
        if (found := direct(function, args, kwargs)) is not None:
            if function is getattr:
                self._note_shared(args[0], args[1], found(*args))
            return found
        # Before the replacements, some of which are of the same functions, such as `torch.tensor`.
        if (error := unsupported_call(function, args, kwargs)) is not None:
            return do_raise(error)
        # Each replaces other functions, so their order does not matter.
        found = (
            torch_types.look_aside(function, args)
            or callbacks.look_aside(function, args, kwargs)
            or torch_functions.look_aside(function, args, kwargs)
            or module_members.look_aside(function, args, self._paths)
        )
        if found is not None:
            return found
        # Before `_unknown`, which refuses `bool` of a number that a condition may be of.
        if function is bool and (known := self._condition(args[0].value)) is not None:
            return lambda _: wrap_const(known)
        found = self._unknown.look_aside(function, args) if self._unknown is not None else None
        found = found or look_aside(function, *args, **kwargs)
        # What a function reads depends on whether it runs natively, so before `Watched` and others take its place.
        self._containers.note_call(function, found is not None, (*args, *kwargs.values()))
        if self._sizes is not None:
            self._sizes.note_call(function, found is not None, args)
        if found is None:
            set_default(function, args)  # before the variables are noted as later calls find them
            if isinstance(function, FunctionType) and function in READ_ENVIRONMENT:
                name = environment_read(function, args)
                self._checks.setdefault((ENVIRONMENT, (ITEM, name)), (EQUAL, Environment()[name]))
            if (error := changing_value(function, args)) is not None:
                return do_raise(error)
            if is_opaque(function):
                found = callbacks.Watched(function)
        if id(function) in _ENDING:
            from .generators import look_aside as look_aside_ending

            found = look_aside_ending(function, args[0]) or found
        if function is next and (error := self._iterators.error(args[0].value)) is not None:
            return do_raise(error)
        if (error := self._containers.error_of_change(function, args)) is not None:
            return do_raise(error)
        # The rest calls what has been found so far.
        if id(function) in _ASSIGNING:
            from .assigned_attributes import look_aside as assign  # here, because most programs assign none

            found = assign(function, args, found, self._object_at(args[0].provenance) is not None)
        if id(function) in CALLS and callable(found) and isinstance(args[0].value, type):
            found = functools.partial(call_for_one_result, found)
        found = self._shapes.look_aside(function, args, found)
        found = torch_functions.checked(leaves, function, found, args, kwargs)
        if (function is hasattr or (function is getattr and len(args) == 3)) and callable(found):
            return functools.partial(self._ask, found)
        return found

    def _condition(self, value: Any) -> bool | None:
        """Return the truth of a value that the outermost module has computed from arguments; ``None`` for others.

        Other modules become leaves.
        """
        leaves = self.leaves
        if leaves is None or not leaves.automatic or self._depth:
            return None
        if not (isinstance(value, TensorProxy) or (self._unknown is not None and self._unknown.has(value))):
            return None
        found = load("extras.leaf_modules.branches:condition_of")(leaves, value)
        if found is None:
            return None
        condition, is_true = found
        self._checks[CONDITIONS, (ITEM, len(self._conditions))] = EQUAL, is_true
        self._conditions.append(condition)
        return bool(is_true)

    def _ask(self, fallback: Callable[..., Any], source: Any, name: Any, *default: Any) -> Any:
        result = fallback(source, name, *default)
        is_tensor = isinstance(source.value, TensorProxy)
        path = self._paths.of_tensor(source.provenance) if is_tensor else self._paths.of(source.provenance)
        if path is None or path[0] not in _ROOTS:
            return result
        if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            plain, key = source.original_value if is_tensor else unwrap(source), unwrap(name)
            if not isinstance(plain, Proxy) and isinstance(key, str) and may_differ((*path, (ATTRIBUTE, key))):
                self._checks.setdefault((*path, (HAS, key)), (IS, hasattr(plain, key)))
        return result

    def _note(self, value: WrappedValue) -> None:
        plain, provenance = value.value, value.provenance
        if provenance.inst is PseudoInst.CONSTANT and not isinstance(plain, bool | NumberProxy):
            return
        if isinstance(plain, _KEYS) and provenance.value is None:
            self._paths.keys[id(provenance)] = provenance, plain
        leaves = self.leaves if isinstance(value.original_value, torch.Tensor) else None  # a part of a tensor has none
        if isinstance(plain, TensorProxy) and not (leaves is None and self._sizes is None):
            path = Paths().of(provenance)
            if path is not None and path[0] in INPUTS:
                if self._sizes is not None:
                    self._sizes.add(path, plain)
                if leaves is not None:
                    leaves.arguments[plain.name] = path, value.original_value
        # Under symbolic values Thunder 0.2.6 does not check these, and later versions check their types alone.
        if isinstance(plain, StringProxy):
            plain = plain.value
        if isinstance(value.original_value, slice):
            plain = value.original_value
        is_number = isinstance(plain, NumberProxy)
        if is_number and plain.value is None:
            if self._unknown is None:
                from .unknown_numbers import UnknownNumbers  # here, because most programs have none

                self._unknown = UnknownNumbers()
            self._unknown.note(plain, provenance)
            return
        if isinstance(plain, IGNORED) and not is_number:
            return
        if isinstance(plain, bool) and self._unknown is not None:
            self._unknown.check_identity(provenance)
        path = self._paths.of(provenance)
        if path is None or path[0] not in _ROOTS:
            return
        if is_number and self._sizes is not None:
            self._sizes.add_number(path, plain)  # also if it is read again, which makes another proxy
        if path in self._checks:
            return
        if is_number:
            self._checks[path] = TYPE, type(plain.value)
            return
        self._iterators.note(plain)
        checked = CHECKED_BY_THUNDER if self._sizes is None else torch.device
        if isinstance(plain, checked) and should_register_for_prologue(provenance):
            return
        self._add(path, plain)

    def _note_global(self, variables: dict[str, Any], name: str, filename: str) -> None:
        """Note a global that no other check covers; it may also be absent, and later shadow a builtin."""
        value = variables.get(name)
        if (isinstance(value, bool) or not isinstance(value, COMPARED)) and is_of_program(filename):
            self._links.add(variables, name)

    def _note_shared(self, source: WrappedValue, name: WrappedValue, value: WrappedValue) -> None:
        """Note an object that several modules have. The interpreter wraps it once, where the program reads it first."""
        owner, key, provenance = source.value, name.value, value.provenance
        if isinstance(owner, torch.nn.Module) and value.value is vars(owner).get(key):
            _, first, first_key = self._holders.setdefault(id(provenance), (provenance, vars(owner), key))
            if first is not vars(owner) or first_key != key:
                self._links.add_same(vars(owner), key, first, first_key)

    def _add(self, path: Path, value: Any) -> None:
        if is_checked(path, value, self._checks):
            self._checks.setdefault(path, check_of(value))
            self._containers.note(path, value)


_ROOTS = (FUNCTION, *INPUTS)
_KEYS = (int, str, NoneType, enum.Enum)
_CONSTANTS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, enum.Enum)
_ENDING = frozenset(map(id, (GeneratorType.close, GeneratorType.throw)))
_ASSIGNING = frozenset(map(id, (setattr, delattr, object.__setattr__)))
