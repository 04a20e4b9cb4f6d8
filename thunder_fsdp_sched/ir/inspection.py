"""Queries on traces: which bound symbols are forward, which proxies they read and define, which compute a value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import thunder
import torch
from thunder.core import dtypes, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, ProxyTag, TensorProxy, variableify
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace

from ..private_thunder import DEFINED, NAMES_OF_ARGS

AGREEMENT: set[str] = set()
"""Names of the symbols with which ranks agree on what they run, such as those of ``transforms.insert_agreement``."""

UNPACKING = frozenset(i for i in PrimIDs if i.name.startswith("UNPACK_"))
"""Prims that name existing values: arguments, and values that forward has saved."""

_BOOKKEEPING = UNPACKING | {PrimIDs.COMMENT, PrimIDs.DEL, PrimIDs.RETURN}

_LIBRARIES = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, thunder.__file__))
"""The folders of torch and Thunder."""


def names(proxies: Iterable[Any]) -> Iterator[str]:
    """Return the names of all proxies among ``proxies``."""
    return (p.name for p in proxies if isinstance(p, Proxy))


def args_of(bsym: BoundSymbol) -> tuple[str, ...]:
    """Return the names of all proxies that ``bsym`` reads. It caches them, like its flat arguments."""
    known = bsym.__dict__
    read: tuple[str, ...] | None = known.get(NAMES_OF_ARGS)
    if read is None:
        read = known[NAMES_OF_ARGS] = tuple([p.name for p in bsym.flat_proxy_args])
    return read


def defined_by(bsym: BoundSymbol) -> tuple[Proxy, ...]:
    """Return the proxies that ``bsym`` defines: its outputs, except those that are also inputs."""
    if bsym.output is None:
        return ()
    known = bsym.__dict__
    defined: tuple[Proxy, ...] | None = known.get(DEFINED)
    if defined is None:
        args = args_of(bsym)
        defined = known[DEFINED] = tuple([p for p in bsym.flat_proxy_outs if p.name not in args])
    return defined


def outs_of(bsym: BoundSymbol) -> tuple[str, ...]:
    """Return the names of all proxies that ``bsym`` defines."""
    return tuple([p.name for p in defined_by(bsym)])


def nbytes_of(tensor: TensorProxy) -> int:
    """Return the bytes of a tensor's elements."""
    return math.prod(map(int, tensor.shape)) * tensor.dtype.bytes


def is_backward_trace(trace: TraceCtx) -> bool:
    """Return whether ``trace`` is the backward half of a split joint trace."""
    return TraceTag.BACKWARD in trace.tags


def return_of(trace: TraceCtx) -> BoundSymbol:
    """Return the trace's return statement, its last bound symbol."""
    bsym = trace.bound_symbols[-1]
    assert bsym.sym.id is PrimIDs.RETURN, f"the trace ends with {bsym.sym.name}, not with its return"
    return bsym


def has_backward(trace: TraceCtx) -> bool:
    """Return whether ``trace`` is a forward trace that may save values for a backward trace, also one without gradients."""
    return isinstance(next(iter(return_of(trace).args), None), dict)


def statement(bsym: BoundSymbol) -> str:
    """Return the line of Python that ``bsym`` prints, without header and subsymbols; a comment if there is no other line."""
    if bsym.sym.id is PrimIDs.RETURN:
        return "return"
    lines = [line.strip() for line in str(bsym).splitlines()]
    return next((line for line in lines if not line.startswith("#")), lines[-1] if lines else "")


def short_form(bsym: BoundSymbol) -> str:
    """Return the first output and the name of ``bsym``, as in ``"t110 = linear"``."""
    if bsym.sym.id is PrimIDs.RETURN:
        return "return"
    return " = ".join([", ".join(outs_of(bsym)[:1]), bsym.sym.name]).removeprefix(" = ")


def source_of(bsym: BoundSymbol) -> str:
    """Return the line of the user's code that made ``bsym``, as ``"folder/model.py:70"``; empty if none is known."""
    if bsym.source_filename is None or bsym.source_positions is None:
        return ""
    return f"{bsym.source_filename}:{bsym.source_positions.lineno}"


def is_library(filename: str) -> bool:
    """Return whether a file is one of torch or Thunder."""
    return filename.startswith(_LIBRARIES)


def statements(trace: TraceCtx) -> list[BoundSymbol]:
    """Return the bound symbols of ``trace`` without ``del``, ``clear_mutable_collection`` and agreement.

    A schedule position, also in a report or an assertion, is an index into this list. It does not change when Thunder
    inserts ``del``, nor does it depend on whether there are other ranks to agree with.
    """
    return [b for b in trace.bound_symbols if is_statement(b)]


WAIT_PARAMS = "fsdp_wait_params"
"""The name of the wait for parameters."""


def python_type_of(value: object) -> type:
    """Return the type of a value, or of the number that a proxy stands for."""
    return value.python_type if isinstance(value, NumberProxy) else type(value)


def is_inexact(value: object) -> bool:
    """Return whether a value is a tensor with a dtype that can have gradients."""
    return isinstance(value, TensorProxy) and dtypes.is_inexact_dtype(value.dtype)


def is_statement(bsym: BoundSymbol) -> bool:
    """Return whether a bound symbol has a schedule position; see :func:`statements`."""
    name = bsym.sym.name
    return bsym.sym.id is not PrimIDs.DEL and name != "clear_mutable_collection" and name not in AGREEMENT


def is_recomputed(bsym: BoundSymbol) -> bool:
    """Return whether backward computes results of ``bsym`` again, as in regions of ``torch.utils.checkpoint``."""
    return BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags or any(
        ProxyTag.RECOMPUTE_IN_BACKWARD in out.tags for out in bsym.flat_proxy_outs
    )


def with_token(wait: BoundSymbol, token: TensorProxy | None) -> BoundSymbol:
    """Return a wait for parameters with a token that keeps fusions apart, or without one."""
    bucket, future, *_ = wait.args
    return wait.from_bsym(args=(bucket, future) if token is None else (bucket, future, token))


def without_token(bsym: BoundSymbol) -> BoundSymbol:
    """Return a wait for parameters without its token; any other bound symbol as it is."""
    return with_token(bsym, None) if bsym.sym.name == WAIT_PARAMS and len(bsym.args) > 2 else bsym


def runs_nothing(bsym: BoundSymbol) -> bool:
    """Return whether a bound symbol is bookkeeping of a trace: unpacking, ``del``, return, comments, agreement."""
    return bsym.sym.id in _BOOKKEEPING or not is_statement(bsym)


def with_bound_symbols(trace: TraceCtx, bsyms: Sequence[BoundSymbol], pass_name: str = "") -> TraceCtx:
    """Return a copy of ``trace`` with other bound symbols and the provenance of the pass that created them, if named."""
    new = from_trace(trace)
    new.bound_symbols = list(bsyms)
    new._any_future_tensors = trace._any_future_tensors
    if pass_name:
        new.set_provenance(TraceProvenance(pass_name))
    return new


def with_marks(trace: TraceCtx, marks: Mapping[int, Mapping[str, Any]], pass_name: str) -> TraceCtx:
    """Return the trace with further keyword arguments of the bound symbols at these positions."""
    bsyms = list(trace.bound_symbols)
    for position, more in marks.items():
        bsyms[position] = bsyms[position].from_bsym(kwargs={**bsyms[position].kwargs, **more})
    return with_bound_symbols(trace, bsyms, pass_name)


def before_return(trace: TraceCtx, *bsyms: BoundSymbol, pass_name: str) -> TraceCtx:
    """Return a copy of ``trace`` with further bound symbols before its return statement."""
    return with_bound_symbols(trace, [*trace.bound_symbols[:-1], *bsyms, return_of(trace)], pass_name)


def snapshot(trace: TraceCtx) -> TraceCtx:
    """Return a copy with its own set of names: names that later passes choose stay free in it."""
    new = from_trace(trace)
    new.bound_symbols = list(trace.bound_symbols)
    new.names = trace.names.copy()
    return new


def communicates(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` or one of its subsymbols communicates and is not one of this package's symbols."""
    from thunder.distributed.prims import PrimIDs as DistPrimIDs

    sym_id = bsym.sym.id
    if isinstance(sym_id, DistPrimIDs):
        return True
    # Executors claim Thunder's communication prims under other names; a process group among the arguments reveals them.
    # So does a leaf module, unless it is known not to communicate.
    # Proxies are left out because they look up any attribute that they lack among the operators, which takes long.
    for arg in bsym.args:
        if isinstance(arg, Proxy):
            continue
        if (
            type(arg).__name__.endswith("ProcessGroup")
            or hasattr(arg, "_get_backend")
            or getattr(arg, "communicates", False)
        ):
            return True
    return any(communicates(sub) for sub in bsym.subsymbols)


def forward_part(trace: TraceCtx) -> list[bool]:
    """Return for each bound symbol of a joint trace whether Thunder's split will put it into the forward trace.

    A trace without a backward part (evaluation) is all forward. The rule is that of
    ``thunder.transforms.autodiff.split_into_forward_and_backward``: everything that forward's outputs need is forward.
    """
    returned = return_of(trace).args[0]
    if not isinstance(returned, dict) or "fw_flat_out" not in returned:
        return [True] * len(trace.bound_symbols)
    needed = set(names(tree_iter(returned["fw_flat_out"])))
    needed.update(names(returned["flat_args"]))
    forward = [False] * len(trace.bound_symbols)
    for i in range(len(trace.bound_symbols) - 2, -1, -1):
        bsym = trace.bound_symbols[i]
        if bsym.sym.id is PrimIDs.GET_GRAD:
            continue
        in_place_on_forward = bsym.sym.name == "copy_" and bsym.args[1].name in needed
        if (
            bsym.sym.id is PrimIDs.UNPACK_TRIVIAL
            or in_place_on_forward
            or any(o.name in needed for o in bsym.flat_proxy_outs)
        ):
            forward[i] = True
            needed.update(args_of(bsym))
            needed.update(outs_of(bsym))
    return forward


def split_joint(trace: TraceCtx) -> list[TraceCtx]:
    """Return the forward and backward halves of a joint trace, for analysis only; just forward if there is no backward.

    Forward returns its outputs and the values that backward reads, and backward unpacks the gradients of the outputs and
    returns those of the inputs, so liveness is that of Thunder's split.
    """
    forward = forward_part(trace)
    last = return_of(trace)
    first = [b for b, is_forward in zip(trace.bound_symbols[:-1], forward[:-1], strict=True) if is_forward]
    rest = [b for b, is_forward in zip(trace.bound_symbols[:-1], forward[:-1], strict=True) if not is_forward]
    second = [b for b in rest if b.sym.id is not PrimIDs.GET_GRAD]
    if not second:
        return [trace]
    given = [b.output for b in rest if b.sym.id is PrimIDs.GET_GRAD]
    second = [*(prims.unpack_trivial.bind(p, name=p.name, output=p) for p in given), *second]
    defined = {o: p for b in first for o, p in zip(outs_of(b), defined_by(b), strict=True)}
    saved = {a: defined[a] for b in second for a in args_of(b) if a in defined}
    returned = {**last.args[0], "output": last.args[0]["fw_flat_out"]}
    halves = []
    for bsyms, args in ((first, (returned, (tuple(saved.values()), ()))), (second, last.args[0]["output"])):
        half = from_trace(trace)
        half.bound_symbols = [*bsyms, last.from_bsym(args=args)]
        halves.append(half)
    return halves


def derivation(bsym: BoundSymbol, out: str) -> list[BoundSymbol]:
    """Return the bound symbols that compute ``out``: ``bsym`` itself, or the subsymbols of a fusion that ``out`` needs."""
    if not bsym.sym.is_fusion:
        return [bsym]
    needed = {out}
    part = []
    for sub in reversed(bsym.subsymbols):
        if any(o in needed for o in outs_of(sub)):
            part.append(sub)
            needed.update(args_of(sub))
    return part[::-1]


def like(original: BoundSymbol, bsym: BoundSymbol) -> BoundSymbol:
    """Return ``bsym`` with the source position and also the tags of ``original``."""
    return bsym.from_bsym(
        tags=original.tags | bsym.tags,
        source_filename=original.source_filename,
        source_positions=original.source_positions,
    )


@contextmanager
def recording(trace: TraceCtx, original: BoundSymbol) -> Iterator[list[BoundSymbol]]:
    """Collect bound symbols added to a trace in this context; at its end, they get the tags and the line of ``original``."""
    added: list[BoundSymbol] = []
    trace.push_scope(added)
    try:
        yield added
    finally:
        trace.pop_scope()
    added[:] = [like(original, bsym) for bsym in added]


def swap_args(bsym: BoundSymbol, swaps: dict[str, Proxy]) -> BoundSymbol:
    """Return ``bsym`` with the inputs named in ``swaps`` replaced, also in its subsymbols; its outputs stay."""
    swap_map = {variableify(p): swaps[p.name] for p in bsym.flat_proxy_args if p.name in swaps}
    return bsym.from_bsym_swap_proxies(swap_map, skip_output=True) if swap_map else bsym


def nested(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield bound symbols and all of their subsymbols."""
    for bsym in bsyms:
        yield bsym
        yield from nested(bsym.subsymbols)


def unused_name(trace: TraceCtx, name: str) -> str:
    """Return ``name``, with underscores after it if ``trace`` uses it already."""
    while trace.has_name(name):
        name += "_"
    return name


def first_tensor(trace: TraceCtx) -> TensorProxy:
    """Return the first argument of a joint trace that is a tensor: a token, see [Note: Tokens of copies]."""
    return next(arg for arg in return_of(trace).args[0]["flat_args"] if isinstance(arg, TensorProxy))
