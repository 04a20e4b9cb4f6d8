"""ZeRO-3 for Lightning Thunder from scratch: torchrun --nproc-per-node 2 examples/from_scratch.py

This file imports Thunder and torch, but nothing from thunder_fsdp_sched: it is that package in small. It trains a GPT on two
processes (*ranks*) and shows that the numbers are those of the unsharded model, and that communication runs beside compute.

With ZeRO-3, each rank stores a part of every parameter, its *shard*. A layer needs whole parameters, so an all-gather
collects them shortly before the layer runs, and they are freed right after it. Backward gathers them again, and a
reduce-scatter averages the gradients, of which each rank keeps the part for its shard. This need not cost time: the
parameters of the next layer can travel while this layer computes.

FSDP2 arranges that while the model runs, with hooks around modules. Thunder instead compiles the model into *traces*: a
straight list of statements for forward and another for backward, without branches. There, communication is just more
statements, and overlap is a question of their order. So this file edits lists:

1. **plan**: which parameters travel together (a *bucket*), and where do they lie in memory?
2. **insert**: unshard each bucket before its first use. Autograd turns this into a reduction in backward.
3. **regather**: let backward gather again, instead of reading parameters that forward has saved.
4. **sort**: issue each collective as early as is useful, and wait for it as late as possible.
5. **check**: refuse to run a list in which something is out of order.
"""

# --8<-- [start:start]
import re
import sys
import types
import warnings
from collections import OrderedDict, defaultdict
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

# Thunder's import lists five methods of torch.Tensor, by their __name__, that torch 2.13 has removed. None is ever called.
for name in ("align_as", "align_to", "has_names", "refine_names", "rename"):
    if not hasattr(torch.Tensor, name):
        setattr(torch.Tensor, name, types.FunctionType((lambda: None).__code__, {}, name))
if not hasattr(torch.autograd.Function.apply, "__func__"):
    sys.exit(f"This example needs torch 2.10 to 2.13. Thunder alone cannot be imported with {torch.__version__}.")
warnings.simplefilter("ignore")  # an optional library of Thunder's is missing; torch 2.13 renames two collectives

import thunder
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import FutureTensorProxy, TensorProxy, variableify  # which makes a proxy a key of a dict
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceTag, from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.core.transforms import get_grad, put_grad
from thunder.executors.passes import del_last_used
from thunder.extend import FusionExecutor, OperatorExecutor


class Block(nn.Module):  # nothing in the model knows of ranks
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


def make_gpt(width=128, heads=4, blocks=2):
    stack = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    return nn.Sequential(OrderedDict(embedding=nn.Embedding(256, width), blocks=stack, head=head))
    # --8<-- [end:start]


# --8<-- [start:plan]
# Each collective has a fixed cost, so the parameters of a block travel together. But how do they lie in memory? FSDP2 cuts
# each *parameter* into one piece for each rank. Gathered data are then sorted by rank, and must be copied to be sorted by
# parameter. Here parameters lie end to end, and the *bucket* is cut, even within a parameter:
#
#     parameters   | norm.weight | qkv.weight               | proj.weight      | padding |
#     shards       | rank 0                      | rank 1                                |
#
# Now both orders are the same. An all-gather fills the unsharded buffer, and parameters are views of it; a shard is one
# range, and this rank's pieces of the parameters are views of that. No copy is needed before or after a gather.
class Bucket:
    def __init__(self, name, parameters):
        """Keep this rank's shard of ``parameters``, a dict by name. All ranks take the values of rank 0."""
        self.name, self.names, self.shapes = name, list(parameters), [p.shape for p in parameters.values()]
        ends = list(accumulate(shape.numel() for shape in self.shapes))
        self.ranges = list(zip([0, *ends], ends, strict=False))
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.numel = -(-ends[-1] // ranks) * ranks  # rounded up
        unsharded = torch.cat([p.detach().flatten() for p in parameters.values()])
        dist.broadcast(unsharded, src=0)
        self.shard = F.pad(unsharded, (0, self.numel - ends[-1])).chunk(ranks)[rank].clone()
        self.pieces = self.shard_views(self.shard)
        self.kind = {"device": devices.to_device(self.shard.device), "dtype": dtypes.to_dtype(self.shard.dtype)}

    def unsharded_views(self, flat):  # the parameters
        return tuple(flat[start:end].view(shape) for (start, end), shape in zip(self.ranges, self.shapes, strict=True))

    def shard_views(self, flat):  # this rank's piece of each parameter: 1-D, and possibly empty
        first = dist.get_rank() * len(flat)
        cuts = ([min(max(end - first, 0), len(flat)) for end in of_one] for of_one in self.ranges)
        return tuple(flat[start:end] for start, end in cuts)


def plan(module):  # a bucket for each block, and one for each other submodule
    groups, seen = defaultdict(dict), set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in seen or not parameter.requires_grad or parameter.dtype != torch.float32:
            raise ValueError(f"{name} is tied, frozen or not float32, and this example has no rule for such parameters")
        seen.add(parameter)
        groups[re.match(r"blocks\.\d+|\w+", name)[0]][name] = parameter
    return [Bucket(*group) for group in groups.items()]
    # --8<-- [end:plan]


# --8<-- [start:collectives]
# A statement of a trace is a *bound symbol*: a function (the symbol) with its arguments and results. While Thunder compiles,
# these are *proxies*, which have names and shapes, but no values. So a symbol of our own has two functions: `meta` returns
# proxies for its results, and `fn` computes these when the compiled trace runs. The first argument names the bucket.
# Issue and wait are two symbols. Issuing returns at once; the bytes move in another thread (on a GPU: on another stream)
# while the statements in between run.
class Collectives:
    def __init__(self, buckets):
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.finished = []  # whether each collective had finished when something waited for it
        self.executor = OperatorExecutor("from_scratch")  # a set of symbols with their implementations
        register = self.executor.register_operator
        self.all_gather = register("all_gather", meta=self.future, fn=self.issue_gather)
        self.wait_params = register("wait_params", meta=self.params, fn=self.finish_gather)
        self.reduce_scatter = register("reduce_scatter", meta=self.future, fn=self.issue_reduction)
        self.wait_grads = register("wait_grads", meta=self.grads, fn=self.finish_reduction)
        # This one never runs: autograd replaces it by `gather_and_reduce`, and without gradients it becomes `gather_now`.
        self.unshard = register("unshard", meta=self.params)
        rules = {"execution_transform": self.gather_now, "grad_transform": self.gather_and_reduce}
        self.executor.register_implementation(self.unshard, **rules)

    # Compiling: proxies for the results.
    def future(self, name, *tensors):
        return FutureTensorProxy(shape=(self.buckets[name].numel,), **self.buckets[name].kind)

    def params(self, name, *tensors):
        bucket = self.buckets[name]
        return tuple(TensorProxy(shape=shape, requires_grad=True, **bucket.kind) for shape in bucket.shapes)

    def grads(self, name, future):
        bucket = self.buckets[name]
        return tuple(TensorProxy(shape=piece.shape, **bucket.kind) for piece in bucket.pieces)

    # Compiling: what `unshard` stands for. Calling a symbol appends a statement to the trace that is being built.
    def gather_now(self, name, *shards):
        return self.wait_params(name, self.all_gather(name, *shards))

    def gather_and_reduce(self, name, *shards):
        params = self.gather_now(name, *shards)  # this is forward, and the rest is backward
        grads = self.wait_grads(name, self.reduce_scatter(name, *map(get_grad, params)))
        for shard, grad in zip(shards, grads, strict=True):
            put_grad(shard, grad)
        return params

    # Running: tensors. Shards are arguments so that the trace shows what a gather reads; it sends the whole shard buffer.
    def issue_gather(self, name, *shards):
        bucket = self.buckets[name]
        unsharded = bucket.shard.new_empty(bucket.numel)
        return dist.all_gather_into_tensor(unsharded, bucket.shard, async_op=True), unsharded

    def finish_gather(self, name, in_flight):
        return self.buckets[name].unsharded_views(self.wait(*in_flight))

    def issue_reduction(self, name, *grads):
        bucket = self.buckets[name]
        padded, own = bucket.shard.new_zeros(bucket.numel), torch.empty_like(bucket.shard)
        torch.cat([grad.flatten() for grad in grads], out=padded[: bucket.ranges[-1][1]])
        return dist.reduce_scatter_tensor(own, padded, async_op=True), own, padded

    def finish_reduction(self, name, in_flight):
        return self.buckets[name].shard_views(self.wait(*in_flight) / dist.get_world_size())  # gloo knows no mean

    def wait(self, work, result, *others):  # the others must stay alive until here
        self.finished.append(work.is_completed())
        work.wait()
        return result
        # --8<-- [end:collectives]


# --8<-- [start:insert]
# Thunder traces the unsharded module into two lists. The *prologue* fetches parameters from the module, and checks that they
# have the shapes that were traced. The *computation* gets them as arguments. But now it will get shards.
def insert(prologue, computation, collectives):
    """Drop the checks of shapes, and unshard each bucket right before the first statement that reads its parameters."""
    param_of = {bsym.output.name: bsym.args[1] for bsym in prologue.bound_symbols if bsym.sym is prims.unpack_parameter}
    check = prims.check_tensor_shape_and_metadata
    kept = [bsym for bsym in prologue.bound_symbols if bsym.sym is not check or bsym.args[0].name not in param_of]
    proxies = {param_of[arg.name]: arg for arg in computation.args if getattr(arg, "name", None) in param_of}
    bucket_of = {}
    for bucket in collectives.buckets.values():
        for name, piece in zip(bucket.names, bucket.pieces, strict=True):
            if name not in proxies:
                raise ValueError(f"forward does not use {name}: the gradients of {bucket.name} would never be complete")
            proxy = proxies[name]
            proxy._shape, proxy._numel, proxy._ndim = piece.shape, piece.numel(), piece.ndim  # a shard now
            bucket_of[proxy.name] = bucket
    new, unsharded = edited(computation, ()), {}
    with tracectx(new):  # the trace to which calls of symbols append
        for bsym in computation.bound_symbols:
            if bsym.sym.name not in ("unpack_trivial", "python_return"):  # these only name arguments
                for bucket in [bucket_of[arg.name] for arg in bsym.flat_proxy_args if arg.name in bucket_of]:
                    shards = [proxies[name] for name in bucket.names]
                    if variableify(shards[0]) not in unsharded:
                        params = collectives.unshard(bucket.name, *shards)
                        unsharded.update(zip(map(variableify, shards), params, strict=True))
                bsym = bsym.from_bsym_swap_proxies(unsharded)
            new.bound_symbols.append(bsym)
    return edited(prologue, kept), new


def edited(trace, bound_symbols):
    new = from_trace(trace)
    new.bound_symbols = list(bound_symbols)
    return new
    # --8<-- [end:insert]


# --8<-- [start:regather]
# Then Thunder differentiates. The *joint* trace is forward and then backward. All that backward reads of forward is saved:
# unsharded parameters and views of them, too, as in ZeRO-2. For ZeRO-3, backward makes these from shards again. Executors
# that fuse statements receive the joint trace; this one only edits it. A view that it does not know only costs memory.
class Regather(FusionExecutor):
    VIEWS = ("expand", "permute", "shallow_copy", "squeeze", "torch_prims_reshape_impl", "unsqueeze")

    def fusion_pass(self, joint):
        source = {}  # for each value that forward makes from shards alone, the statement that makes it
        copies, bsyms = {}, []  # the values in backward that replace those

        def need(proxy):  # repeat the statement that made a value, once, after those that made its arguments
            if proxy.name in source and variableify(proxy) not in copies:
                bsym = source[proxy.name]
                for arg in bsym.flat_proxy_args:
                    need(arg)
                copies.update({variableify(out): out.replace_name(f"bw_{out.name}") for out in bsym.flat_proxy_outs})
                bsyms.append(bsym.from_bsym_swap_proxies(copies))
                bsyms[-1].tags.add(BoundSymbolTag.BACKWARD)

        with tracectx(joint):
            for bsym in joint.bound_symbols:
                if BoundSymbolTag.BACKWARD in bsym.tags:
                    for proxy in bsym.flat_proxy_args:
                        need(proxy)
                    bsym = bsym.from_bsym_swap_proxies(copies, skip_output=True)
                elif bsym.sym.name in ("all_gather", "wait_params", *self.VIEWS):
                    if bsym.sym.name == "all_gather" or bsym.flat_proxy_args[0].name in source:
                        source.update({out.name: bsym for out in bsym.flat_proxy_outs})
                bsyms.append(bsym)
        return edited(joint, bsyms)
        # --8<-- [end:regather]


# --8<-- [start:sort]
# So far each collective is followed by its wait: nothing overlaps. Compute keeps its order, so results stay bit for bit the
# same; communication may move in between. A higher ``prefetch`` hides a slower link, and takes more memory.
ISSUES, WAITS = ("all_gather", "reduce_scatter"), ("wait_params", "wait_grads")
FREES = ("python_del", "clear_mutable_collection")


def sort(trace, prefetch=1):
    """Issue gathers ``prefetch`` buckets ahead and reductions at once, and put each wait right before its first reader."""
    wait_of = {bsym.args[1].name: bsym for bsym in trace.bound_symbols if bsym.sym.name in WAITS}
    compute = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in (*ISSUES, *WAITS, *FREES)]
    last = len(compute) - 1  # the return
    made = {out.name: i for i, bsym in enumerate(compute) for out in bsym.flat_proxy_outs}
    read = {arg.name: last - i for i, bsym in enumerate(reversed(compute)) for arg in bsym.flat_proxy_args}  # first
    before, after = defaultdict(list), defaultdict(list)  # what goes before and after each statement of compute

    def first_reader(gather):
        return min(read.get(param.name, last) for param in wait_of[gather.output.name].flat_proxy_outs)

    def last_gradient(reduction):
        return max(made[grad.name] for grad in reduction.flat_proxy_args)

    gathers = sorted((b for b in trace.bound_symbols if b.sym.name == "all_gather"), key=first_reader)
    for i, gather in enumerate(gathers):
        before[first_reader(gathers[max(i - prefetch, 0)])].append(gather)
    for gather in gathers:
        before[first_reader(gather)].append(wait_of[gather.output.name])
    pending = []  # the wait for the latest reduction; it comes before the next reduction, and frees the buffers
    for reduction in sorted((b for b in trace.bound_symbols if b.sym.name == "reduce_scatter"), key=last_gradient):
        after[last_gradient(reduction)] += [*pending, reduction]
        pending = [wait_of[reduction.output.name]]
    before[last] += pending
    merged = [b for i, bsym in enumerate(compute) for b in (*before[i], bsym, *after[i])]
    # Thunder inserts `del` after the last reader of each value. With its last view, an unsharded buffer is freed.
    return del_last_used(edited(trace, merged), clear_mutable_collections=TraceTag.BACKWARD in trace.tags)
    # --8<-- [end:sort]


# --8<-- [start:check]
# A wrong order need not crash. It can also give wrong numbers, or ranks that wait for each other forever. So nothing runs
# unchecked. The check does not know how a list was made: it walks through it as Python will.
def check(trace):
    """Return (communication or "", what is in flight) for each statement; raise an error if one is out of order."""
    defined, in_flight, steps = set(), {}, []
    bsyms = [bsym for bsym in trace.bound_symbols if bsym.sym.name not in FREES]
    for i, bsym in enumerate(bsyms):
        name, outs = bsym.sym.name, {out.name for out in bsym.flat_proxy_outs}
        what = f"{name} {bsym.args[0]}" if name in ISSUES + WAITS else name
        if missing := {arg.name for arg in bsym.flat_proxy_args} - defined:
            raise RuntimeError(f"{what} reads {min(missing)} before it is defined")
        defined |= outs
        if name in ISSUES:
            in_flight[bsym.output.name] = what
        elif name in WAITS:
            issue = ISSUES[WAITS.index(name)]
            oldest = next((future for future, issued in in_flight.items() if issued.startswith(issue)), None)
            if oldest != bsym.args[1].name or in_flight.pop(oldest) != f"{issue} {bsym.args[0]}":
                raise RuntimeError(f"{what} does not wait for the oldest {issue} in flight")
            reader = next(b for b in bsyms[i:] if b.sym.name not in ISSUES + WAITS)
            if name == "wait_params" and not outs & {arg.name for arg in reader.flat_proxy_args}:
                raise RuntimeError(f"{what} is too early: {reader.sym.name} follows, and reads none of its parameters")
        if not name.startswith("unpack"):  # these only name arguments
            steps.append((what if what != name else "", tuple(in_flight.values())))
    if in_flight:
        raise RuntimeError(f"nothing waits for {', '.join(in_flight.values())}")
    dist.all_gather_object(of_ranks := [None] * dist.get_world_size(), steps)
    if any(other != steps for other in of_ranks):  # so all ranks raise it
        raise RuntimeError("ranks have compiled different programs, and would wait for each other forever")
    return steps


def show(title, steps):  # with one line for successive statements beside the same collectives
    compute = [in_flight for what, in_flight in steps if not what]
    print(f"{title}: {sum(map(bool, compute))} of {len(compute)} statements of compute run beside communication")
    for (what, in_flight), group in groupby(steps):
        print(f"  {what}" if what else f"    {len([*group]):3} statements beside {', '.join(in_flight) or 'nothing'}")
    # --8<-- [end:check]


# --8<-- [start:train]
# Thunder calls the methods of a transform in this order: the first one once, the others for each new shape of inputs.
class FromScratch(Transform):
    def transform_module(self, model):
        self.collectives, self.schedules = Collectives(plan(model._model)), []
        for bucket in self.collectives.buckets.values():
            for name, piece in zip(bucket.names, bucket.pieces, strict=True):
                model._overrides_parameters[name] = nn.Parameter(piece)  # model.parameters() now returns it
                original = model._model.get_parameter(name)  # tracing needs its shape, but no memory
                original.data = original.data.new_empty(1).expand(original.shape)
        data = thunder.compile_data(model)
        data.executors_list = (self.collectives.executor, Regather("regather"), *data.executors_list)

    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
        return *insert(prologue, computation, self.collectives), epilogue

    # Here Thunder differentiates, runs `Regather`, and splits the joint trace.
    def transform_trace_post_optimization(self, trace, **kwargs):  # forward, then backward
        self.schedules.append(check(trace := sort(trace)))
        return trace


def train(steps=6):
    """Train a sharded and an unsharded GPT; return the transform, and the largest difference between parameters."""
    torch.manual_seed(0)
    model = thunder.jit(make_gpt(), transforms=[transform := FromScratch()])
    torch.manual_seed(0)
    reference = thunder.jit(make_gpt())
    # Make optimizers after thunder.jit: before, they would get the original parameters, which no longer have gradients.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, reference)]
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own batches
    for step in range(steps):
        tokens = torch.randint(256, (4, 64))
        losses = [F.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()) for each in (model, reference)]
        sum(losses).backward()
        for parameter in reference.parameters():  # as the reductions of the sharded model do
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[0]:.6f}, unsharded {losses[1]:.6f}")
    # Shard the trained reference, too, and compare shards. Two ranks have only one order of addition, so bits are the same.
    pairs = zip(transform.collectives.buckets.values(), plan(reference._model), strict=True)
    return transform, max((bucket.shard - expected.shard).abs().max().item() for bucket, expected in pairs)


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        sys.exit("Start two processes: torchrun --nproc-per-node 2 examples/from_scratch.py")
    dist.init_process_group("gloo")
    transform, difference = train()
    if dist.get_rank() == 0:
        for title, schedule in zip(("forward", "backward"), transform.schedules, strict=True):
            show(title, schedule)
        finished = transform.collectives.finished
        print(f"{sum(finished)} of {len(finished)} collectives had finished when something waited for them")
        print(f"largest difference of a parameter from the unsharded model: {difference}")
    assert difference <= (0 if dist.get_world_size() == 2 else 1e-4), difference
    dist.destroy_process_group()
