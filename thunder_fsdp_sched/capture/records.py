"""The record of one traced module call: what it read, and what it added to the trace.

[Note: Repeated modules]
The interpretation of a module's ``forward`` depends on what it reads: its arguments, attributes of the module and of its
submodules, globals, closures. While a module call is traced, an observer logs the paths of all that is read. The
interpreter itself reads, too, without an instruction of the program: the code and defaults of a function that it runs, and
the class of an object, where it looks up methods, operators, properties and descriptors. So the state of each function
that runs and of each class whose instances the program handles is also logged (``state_of`` in ``keys``). Another
module that has the same values in the same places takes the same way through the same code, so it gets copies of the
recorded bound symbols, with its own parameters, buffers and inputs. Tensors are the same if their metadata are, since a
trace has proxies in their place. Tensors and modules that are one object in two places must be so again.

A call that does more than read and compute is not repeated, but interpreted each time: if it writes to an object that it
did not make (a counter, a cache), calls a function that is not known to be pure (random numbers of Python, the time, an
iterator that it did not make) or one that may call the program back (see [Note: Code that is not seen] in ``native_code``),
reads under a computed name, reads an attribute of an object that the caller of the compiled module passes, or as a whole
a container that is too long or too deep to be compared, defines an operator (``torch.autograd.Function``),
leaves another grad mode than it found, or reads or returns what comes from elsewhere.

The bound symbols and the checks of the prologue are the same as with full tracing, in the same order, up to names.

[Note: Records and the grad mode]
Thunder interprets a module in the same way with and without gradients, unless the program asks for the grad mode. The
traces differ in two places, both of which can be rewritten:

1. Without gradients ``Symbol.__call__`` tags the tensors that a symbol makes, also those of subsymbols, with
   ``DETACHED_AUTOGRAD_GRAPH``. Neither arguments that a symbol returns nor numbers are tagged.
2. ``thunder.torch`` passes the grad mode to ``prims.copy_``, which in-place operators end with.

A record is *portable* if nothing else can differ:

- The program neither reads nor changes the grad mode. The observer counts such uses.
- All symbols, with subsymbols, belong to ``thunder.torch`` or ``thunder.core.prims``, whose metadata functions do not
  depend on the grad mode otherwise. Symbols that Thunder registers automatically do: they run torch's operator on fake
  tensors and take ``requires_grad`` from the result. Symbols that call functions (``activation_checkpoint``, autograd
  functions), those of other executors, and custom operators may do anything.
- The tags and the arguments of ``prims.copy_`` are those that both rules predict for the mode of the record.

Other records hold only in the mode in which they were made, which includes torch's own grad mode and inference mode.

Arguments of a call without gradients may have been made with gradients, and vice versa. Without gradients the tag of an
argument changes nothing, because all that a portable call makes has the tag anyway. With gradients, calls with such
arguments repeat only records of calls with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy, unvariableify
from thunder.core.symbol import BoundSymbol, Symbol

from ..ir.inspection import nested
from ..ir.symbols import LEAF
from ..private_interpreter import checks_of, renames_of
from .keys import key_of
from .observer import Mark, Observer, Unrepeatable
from .paths import ATTRIBUTE, ATTRIBUTES, COMPUTED, INPUTS, MEMBERS, NAMESPACES, STATE, Path, Paths, evaluate

#
# Grad modes
#

DETACHED = ProxyTag.DETACHED_AUTOGRAD_GRAPH
"""Thunder's tag of tensors that are constants for differentiation."""

_CALL_FUNCTIONS = ("set_grad_enabled", "activation_checkpoint", "torch.ops.higher_order.autograd_function_apply")
"""The ids of Thunder's symbols that change the grad mode or call a function, which may change it."""


class GradMode(NamedTuple):
    """The state of Thunder and torch that decides whether operators are recorded for backward."""

    enabled: bool  # whether Thunder's trace is in a region with gradients
    of_torch: bool  # torch.is_grad_enabled(), which Thunder does not change when a traced program does
    infers: bool  # torch.is_inference_mode_enabled()


def grad_mode_of(compile_data: Any) -> GradMode:
    """Return the grad mode in which Thunder traces the next operator."""
    return GradMode(compile_data.is_grad_enabled, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def is_portable(bsyms: Sequence[BoundSymbol], known: Set[str], enabled: bool) -> bool:
    """Return whether bound symbols of a module call in one grad mode determine those in the other one.

    Args:
        bsyms: those of a call that neither reads nor changes the grad mode.
        known: the names of the proxies that the call did not make.
        enabled: whether the call was traced with gradients.
    """
    symbols: dict[int, Symbol] = {}
    made: dict[str, Proxy] = {}
    returned: set[str] = set()
    for bsym in nested(bsyms):
        symbols[id(bsym.sym)] = bsym.sym
        if bsym.sym.id is PrimIDs.COPY_ and bsym.kwargs.get("grad_enabled") is not enabled:
            return False
        arguments = {proxy.name for proxy in bsym.flat_proxy_args}
        for proxy in bsym.flat_proxy_outs:
            if proxy.name in arguments:
                returned.add(proxy.name)
            else:
                made[proxy.name] = proxy
    return (
        all(map(_is_understood, symbols.values()))
        and not any(bsym.sym.id is PrimIDs.COPY_ for bsym in bsyms)  # the program itself has chosen the argument
        and returned <= {*known, *made}
        and all((DETACHED in proxy.tags) is _is_detached(proxy, enabled) for proxy in made.values())
    )


def tags_in(proxy: Proxy, tags: Iterable[Any], enabled: bool) -> set[Any]:
    """Return the tags that a proxy which a portable call makes has with or without gradients."""
    return {*tags, DETACHED} if _is_detached(proxy, enabled) else {*tags} - {DETACHED}


def kwargs_in(bsym: BoundSymbol, enabled: bool) -> dict[str, Any]:
    """Return the keyword arguments that a bound symbol of a portable call has with or without gradients."""
    return {**bsym.kwargs, "grad_enabled": enabled} if bsym.sym.id is PrimIDs.COPY_ else bsym.kwargs


def _is_detached(proxy: Proxy, enabled: bool) -> bool:
    return not enabled and isinstance(proxy, TensorProxy)


def _is_understood(sym: Symbol) -> bool:
    """Return whether the grad mode changes only tags and ``prims.copy_`` in what a call of ``sym`` adds to a trace."""
    if sym.executor is not None or OpTags.AUTO_REGISTERED in (sym.tags or ()) or sym.id in _CALL_FUNCTIONS:
        return False
    return any(getattr(module, sym.name, None) is sym for module in (ltorch, prims))


#
# Records
#


class Arguments(NamedTuple):
    """The arguments of a call."""

    key: Any  # equal for calls that are traced alike, as far as their arguments go, except for `detached`
    tensors: tuple[WrappedValue, ...]  # the tensors, whose values are proxies, in the order of their first appearance
    detached: frozenset[int]  # which of the tensors were made without gradients


def flatten(args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> Arguments:
    """Return the arguments of a call.

    Raises:
        Unrepeatable: one is a number that Thunder traces, or a tensor without a proxy.
    """
    tensors: dict[str, WrappedValue] = {}
    positional = tuple(_flatten(arg, tensors) for arg in args)
    named = tuple((name, _flatten(arg, tensors)) for name, arg in kwargs.items())
    detached = frozenset(i for i, wrapped in enumerate(tensors.values()) if DETACHED in wrapped.value.tags)
    return Arguments((positional, named), tuple(tensors.values()), detached)


def _flatten(wrapped: WrappedValue, tensors: dict[str, WrappedValue]) -> Any:
    value = wrapped.value
    if isinstance(value, TensorProxy):
        tensors.setdefault(value.name, wrapped)
        is_parameter = issubclass(wrapped.python_typ, torch.nn.Parameter)
        return list(tensors).index(value.name), _metadata(value), frozenset(value.tags) - {DETACHED}, is_parameter
    if isinstance(value, Proxy | torch.Tensor):
        raise Unrepeatable(f"an argument is a {type(value).__name__}")
    if type(value) in (tuple, list):
        wrapped.track_items()
        return type(value), tuple(_flatten(item, tensors) for item in wrapped.item_wrappers)
    if type(value) is dict:
        wrapped.track_items()
        return dict, tuple((key_of(key), _flatten(wrapped.item_wrappers[key], tensors)) for key in value)
    return key_of(value)


def _metadata(proxy: TensorProxy) -> Any:
    return type(proxy), tuple(proxy.shape), proxy.true_dtype, str(proxy.device), bool(proxy.requires_grad)


class Read(NamedTuple):
    """A value that the call read."""

    path: Path  # without the path of the module if it is inside the module
    is_inside: bool  # whether it is the module itself or was read from it
    key: Any = None  # equal for values that are traced alike
    alias: Read | None = None  # where the same object was read before, whose path the interpreter knows it by

    def at(self, module_path: Path) -> Path:
        """Return the path of the value for the module at ``module_path``."""
        return (*module_path, *self.path) if self.is_inside else self.path


class Check(NamedTuple):
    """A check of the prologue."""

    read: Read
    check: Any  # the function of Thunder that writes the check
    proxy: Proxy  # of the recorded value
    expected: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """The reads and results of tracing one module call."""

    reads: tuple[Read, ...]  # all values that were read, in order
    arguments: tuple[Proxy, ...]  # the tensors among the arguments
    inputs: dict[str, Read]  # the tensors that the bound symbols read besides, by the names of their proxies
    bsyms: tuple[BoundSymbol, ...]
    checks: tuple[Check, ...]  # that were added to the prologue
    tags: dict[str, frozenset[Any]]  # of each proxy that the bound symbols make, by name
    renames: dict[str, str]  # names of the user's variables for proxies, by their names
    result: Any  # proxies, numbers, strings, None, and containers of such
    mode: GradMode  # of the recorded call
    detached: frozenset[int]  # which of its tensor arguments had the tag DETACHED
    is_portable: bool  # whether the record holds in other grad modes
    leaves: dict[Any, str] = field(
        default_factory=dict
    )  # the calls of leaf modules, with their paths within the module
    ties: tuple[int, ...] = ()  # if there are leaves, which parameters of the module are one

    def fits(self, module_path: Path, roots: Mapping[Path, Any], mode: GradMode, detached: frozenset[int]) -> bool:
        """Return whether the program would read the same for the module at ``module_path``, in a mode in which this holds.

        Args:
            detached: the arguments of the call with the tag ``DETACHED``.
        """
        if (mode, detached) != (self.mode, self.detached) and (not self.is_portable or (mode.enabled and detached)):
            return False
        known, objects = dict(roots), dict[int, int]()
        for read in self.reads:
            alias = read.alias.at(module_path) if read.alias else None
            if _key(read.at(module_path), alias, known, objects) != read.key:
                return False
        return True


def make_record(
    observer: Observer, since: Mark, module_path: Path, arguments: Arguments, result: WrappedValue, mode: GradMode
) -> Record:
    """Return the record of a traced call of the module at ``module_path``.

    Args:
        since: the mark at which the call began.
        result: what it has returned.
        mode: the grad mode in which it began.

    Raises:
        Unrepeatable: the call has an effect, depends on something, or returns something, that a repetition could not
            reproduce.
    """
    observer.check(since)
    if grad_mode_of(get_compile_data()) != mode:
        raise Unrepeatable("the program leaves another grad mode")
    context, paths = observer.context, observer.paths
    bsyms = context.computation_trace.peek_scope()[since.bsyms :]
    seen, known, objects = [], dict(observer.roots), dict[int, int]()
    parts = _parts_of(evaluate(module_path, known))
    for path in dict.fromkeys(part for whole in observer.reads[since.reads :] for part in (whole[:-1], whole) if part):
        if path[0] in INPUTS or any(isinstance(known.get(path[:n]), torch.Tensor) for n in range(1, len(path))):
            continue  # compared with the arguments, or with the metadata of the tensor
        alias = observer.aliases.get(path)
        key = _key(path, alias, known, objects)
        read = _read(path, module_path)._replace(key=key, alias=_read(alias, module_path) if alias else None)
        if not read.is_inside and id(known.get(path)) in parts:
            raise Unrepeatable(f"a part of the module is read from elsewhere: {path[1:]}")
        seen.append(read)
    passed = {wrapped.value.name: wrapped.value for wrapped in arguments.tensors}
    made = [p for bsym in nested(bsyms) for p in bsym.flat_proxy_outs]
    tags = {p.name: frozenset(p.tags) for p in made}
    inputs: dict[str, Read] = {}
    for bsym in nested(bsyms):
        for proxy in bsym.flat_proxy_args:
            if not any(proxy.name in known for known in (tags, passed, inputs)):
                inputs[proxy.name] = _read(_path_of(proxy, paths), module_path)
    written = []
    for check, proxy, *expected in checks_of(context)[since.checks :]:
        written.append(Check(_read(_path_of(proxy, paths), module_path), check, proxy, tuple(expected)))
    returnable = {*tags, *inputs, *passed}
    renames = list(renames_of(context).items())[since.renames :]
    names = {name: new.name for old, new in renames if (name := unvariableify(old).name) in tags}
    returned = _unwrap(result, returnable)
    reads_mode = observer.uses_of_grad_mode != since.uses_of_grad_mode
    portable = not reads_mode and is_portable(bsyms, {*inputs, *passed}, mode.enabled)
    modes = mode, arguments.detached, portable
    leaves = _leaves_in(bsyms, evaluate(module_path, known), inputs)
    ties = ties_of(evaluate(module_path, known)) if leaves else ()
    return Record(
        *(tuple(seen), tuple(passed.values()), inputs, tuple(bsyms), tuple(written), tags, names, returned),
        *(*modes, leaves, ties),
    )


def _leaves_in(bsyms: Iterable[BoundSymbol], module: torch.nn.Module, inputs: Mapping[str, Read]) -> dict[Any, str]:
    """Return the calls of leaf modules among bound symbols, with the path of each leaf within ``module``."""
    found: dict[Any, str] = {}
    for bsym in nested(bsyms):
        if bsym.sym.name == LEAF and bsym.args[0].modules:
            leaf, *tensors = bsym.args
            path = next((path for path, part in module.named_modules() if part in leaf.modules), None)
            parameters = tensors[len(leaf.inputs) :]
            if path is None or not all(p.name in inputs and inputs[p.name].is_inside for p in parameters):
                raise Unrepeatable("a leaf module, or a parameter of one, is a part of another module, too")
            found[leaf] = path
    return found


def ties_of(module: torch.nn.Module) -> tuple[int, ...]:
    """Return for each name of a parameter the number of the first one with the same parameter."""
    first: dict[int, int] = {}
    named = module.named_parameters(remove_duplicate=False)
    return tuple(first.setdefault(id(parameter), number) for number, (_, parameter) in enumerate(named))


def _read(path: Path, module_path: Path) -> Read:
    is_inside = path[: len(module_path)] == module_path
    return Read(path[len(module_path) :] if is_inside else path, is_inside)


def _parts_of(module: torch.nn.Module) -> set[int]:
    """Return the identities of the submodules, parameters and buffers of ``module``."""
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def _path_of(proxy: Any, paths: Paths) -> Path:
    history = getattr(proxy, "history", None)
    path = None if history is None else paths.of(history)
    if path is None or path is COMPUTED or path[0] in INPUTS:
        raise Unrepeatable(f"{getattr(proxy, 'name', proxy)} comes from outside of the module")
    return path


def _key(path: Path, alias: Path | None, known: dict[Path, Any], objects: dict[int, int]) -> Any:
    try:
        value = evaluate(path, known)
    except Exception:  # reading may run any code
        return "absent"
    if alias is not None and alias[0] not in INPUTS and _is_at(alias, value, known):
        return "the object of the alias"
    if path[-1] == (ATTRIBUTE, "__self__") and _is_at(path[:-2], value, known):
        return "the object of the method"
    if path[-1] == STATE:
        return value
    if len(path) == 1 or path[-1] in NAMESPACES:
        return key_of(value) if isinstance(value, torch.nn.Module) else "namespace"
    if path[-1] == ATTRIBUTES:
        return "names", tuple(name for name in value if name != _WRITTEN_BY_WARNINGS)
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return key_of(value), objects.setdefault(id(value), len(objects))
    if isinstance(value, _METHODS) and path[-1][0] == ATTRIBUTE and value.__self__ is evaluate(path[:-1], known):
        return "method of the object before", getattr(value, "__func__", value.__name__)
    if path[-1] in MEMBERS and isinstance(value, dict):
        return tuple((key, key_of(member)) for key, member in value.items())
    return key_of(value)


def _is_at(path: Path, value: Any, known: dict[Path, Any]) -> bool:
    try:
        return evaluate(path, known) is value
    except Exception:  # reading may run any code
        return False


_WRITTEN_BY_WARNINGS = "__warningregistry__"
"""The name under which a module's namespace gets the warnings that were shown; no program reads it."""

_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)


def _unwrap(wrapped: WrappedValue, returnable: set[str]) -> Any:
    value = wrapped.value
    if isinstance(value, Proxy):
        if value.name not in returnable:
            raise Unrepeatable(f"the result {value.name} comes from outside of the module")
        return value
    if type(value) in (tuple, list):
        wrapped.track_items()
        return type(value)(_unwrap(item, returnable) for item in wrapped.item_wrappers)
    if type(value) is dict:
        wrapped.track_items()
        return {key: _unwrap(wrapped.item_wrappers[key], returnable) for key in value}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise Unrepeatable(f"the result is a {type(value).__name__}")
